"""One list of policies that between them use every parameter and branch, for the properties that all must have."""

import numpy as np

from oled_jax.retention import Table, policy_by_name
from oled_jax.retention.frequency import StaticFrequency
from oled_jax.retention.priority import Oled, Status
from tests.retention.streams import EXPERTS, LAYERS

_RNG = np.random.default_rng(0)
COUNTS = Table(_RNG.integers(0, 9, (LAYERS, EXPERTS)))
CHANCES = Table(_RNG.random((3, 10)))
SUCCESSORS = Table(_RNG.integers(-1, EXPERTS, (LAYERS, 4, 3)))  # one of the streams' token ids has none

POLICIES = {
    policy.label if name is None else name: policy
    for name, policy in [
        (None, policy_by_name("ondemand")),
        (None, policy_by_name("lru")),
        (None, policy_by_name("lru:mode=select,tie=load")),
        (None, policy_by_name("fifo:tie=hash")),
        (None, policy_by_name("random:seed=7")),
        (None, policy_by_name("lfu:mode=select,weight=token")),
        (None, policy_by_name("lfuda:tie=load")),
        ("static-frequency", StaticFrequency(counts=COUNTS)),
        (None, policy_by_name("oled")),
        (None, policy_by_name("oled:rho_in=0.9,w_jc=0.3")),
        ("oled calibrated", Oled(mode="select", w="calibrated", aggregation="noisy-or", rho_in=0.3, table=CHANCES)),
        (None, policy_by_name("status")),
        ("status with successors", Status(mode="protect", successors=SUCCESSORS, tie="hash")),
    ]
}
ADMITTING = {name: policy for name, policy in POLICIES.items() if policy.admits}
