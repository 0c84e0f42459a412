"""Dispatch rules by name, as command lines and configs spell them: ``all-device``, ``oled:swaps=2,fill=true``."""

from oled_jax.dispatch.rules import AllDevice, Auto, Dali, DispatchRule, Fiddler, FreeToken, HybriMoE, Oled
from oled_jax.parameters import from_text

_RULES = {rule.name: rule for rule in (AllDevice, Fiddler, FreeToken, HybriMoE, Dali, Oled, Auto)}


def dispatch_names() -> tuple[str, ...]:
    """The names that ``dispatch_by_name`` knows."""
    return tuple(_RULES)


def dispatch_by_name(text: str) -> DispatchRule:
    """Reads ``name`` or ``name:parameter=value,parameter=value``.

    OledError for an unknown name, parameter or value; it lists the known ones, and all problems at once.
    """
    return from_text(text, _RULES, "dispatch rules")
