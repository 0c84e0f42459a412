"""Conversion between the published Hugging Face layout and the converted Orbax folder (command ``oled-convert``).

``to_orbax`` and ``to_hf`` write, ``comparison`` and ``inspection`` only read, ``staging`` holds what both writers
promise about the destination, ``cli`` is the command.
"""
