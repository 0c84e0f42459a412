"""The words that generated tasks are made of: few, short and common, so that a small vocabulary knows them."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _listed("""
    ant apple arm bag ball bear bed bee bell bird boat bone book box boy bread bus cake camp car cat chair clock cloud
    coat cow cup deer desk dog door duck ear egg eye farm fish flag food foot fox frog game gate girl goat gold hair
    hand hat hill home horse house ice key king lake lamp leaf leg light lion map milk moon mouse nest note nut oak
    page pan park path pen pig pond pot queen rain ring river road rock room rope rose salt sand sea seed ship shoe
    shop snow sock song star stone sun table tail tent tooth town toy train tree wall water wind wolf wood wool
    """)
NAMES = _listed("""
    Adam Alice Anna Ben Bob Carl Clara David Emma Eva Frank Fred Grace Hanna Henry Ida Jack Jane John Julia Karl Laura
    Leo Lily Lucy Maria Mark Max Mia Nina Noah Nora Olga Oscar Otto Paul Peter Rosa Ruth Sam Sara Simon Tom Vera
    """)
CITIES = _listed("Athens Bergen Berlin Bern Boston Cairo Delhi Kyoto Lima Lisbon London Oslo Paris Prague Rome")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLORS = ("black", "blue", "brown", "green", "gray", "orange", "pink", "red", "white", "yellow")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
