"""One list of policies that between them use every parameter and branch, for the properties that all must have.

``static-front`` is not among them: it is the one policy that cannot do with as many slots in every layer.
"""

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
        (None, policy_by_name("lfu-incache")),
        (None, policy_by_name("lfru:weight=token")),
        (None, policy_by_name("lfuda:tie=load")),
        (None, policy_by_name("lfuda-conf:mode=select")),
        (None, policy_by_name("s3fifo:small=0.3")),
        ("static-frequency", StaticFrequency(counts=COUNTS)),
        (None, policy_by_name("static-uniform:seed=3")),
        (None, policy_by_name("static-block")),
        (None, policy_by_name("tide:tau=2")),
        (None, policy_by_name("tide-paper:mode=protect,tau=1")),
        (None, policy_by_name("mixtral-tide:mode=protect,tie=hash")),
        (None, policy_by_name("hybrimoe:alpha=0.3")),
        (None, policy_by_name("dali")),
        (None, policy_by_name("oled")),
        (None, policy_by_name("oled:rho_in=0.9,w_jc=0.3")),
        (None, policy_by_name("oled:mode=select,aggregation=max,rho_in=0.5")),
        ("oled calibrated", Oled(mode="select", w="calibrated", aggregation="noisy-or", rho_in=0.3, table=CHANCES)),
        (None, policy_by_name("oled-steps:mode=select,rho_in=0.5,rho_r=2,pace=0.3")),
        (None, policy_by_name("oled-steps:aggregation=max")),
        (None, policy_by_name("boundary:mode=select,base=oled,rho_in=0.7,share=0.3")),
        (None, policy_by_name("status")),
        (None, policy_by_name("status:mode=protect,others=popular,tie=load")),
        ("status with successors", Status(mode="protect", successors=SUCCESSORS, tie="hash", others="auto")),
    ]
}
ADMITTING = {name: policy for name, policy in POLICIES.items() if policy.admits}
