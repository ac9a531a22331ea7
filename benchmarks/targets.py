"""What the CPU cases of the documents' tables are meant to reach, over which library. The tables say whether they do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Target(NamedTuple):
    """One thing to reach on a case.

    Attributes
    ----------
    peer : str
        The library, in its fastest setting whatever the accuracy; empty for a time.
    ratio : float
        How many times as fast as the peer, 1 for no slower.
    seconds : float
        The longest that a call may take, where that is the target.
    """

    peer: str = ""
    ratio: float = 0.0
    seconds: float = 0.0


def _targets() -> dict[str, tuple[Target, ...]]:
    found: dict[str, tuple[Target, ...]] = {}

    def over(peer: str, ratios: Mapping[str, float]) -> None:
        for case, ratio in ratios.items():
            found[case] = (*found.get(case, ()), Target(peer, ratio))

    single = {3: 2.3, 5: 4.0, 7: 4.5, 9: 3.5, 11: 3.5, 15: 7.0, 31: 2.0}
    over("opencv", {f"single-4096-k{k}-float32-valid": ratio for k, ratio in single.items()})
    over("opencv", {f"single-4096-k{k}-float32-valid-normwise": r for k, r in ((15, 7.0), (31, 4.0))})
    for k in (3, 5, 7):
        types = {"float64": 2.5, "uint8": 3.0, "int16": 8.0}
        over("opencv", {f"single-4096-k{k}-{label}-valid": ratio for label, ratio in types.items()})
        over("scipy", {f"single-4096-k{k}-int32-valid": 80.0})
        over("ndimage", {f"single-4096-k{k}-int32-valid": 25.0})
    found["single-8-k3-float32-valid"] = (Target(seconds=3e-6),)
    over("opencv", {f"single-{size}-k3-float32-valid": r for size, r in ((64, 1.0), (512, 3.0), (1024, 3.0))})
    over("opencv", {f"separable-4096-k{k}-float32": 2.0 for k in (3, 5, 7, 15, 31)})
    over(
        "torch",
        {
            "network-1-n1000": 10.0,
            "network-2-n1000": 2.1,
            "resnet-64-64-56x56-k3-n16": 1.0,
            "resnet-64-64-56x56-k3-n16-normwise": 1.5,
            "resnet-256-256-14x14-k3-n16": 1.0,
            "resnet-256-256-14x14-k3-n16-normwise": 1.5,
            "resnet-3-64-224x224-k7-s2-n16": 2.2,
            "depthwise-96-56x56-k3-n16": 1.25,
            "depthwise-96-56x56-k7-n16": 2.0,
            "depthwise-128-56x56-k31-n4": 1.5,
            "depthwise-128-56x56-k31-n4-normwise": 2.5,
        },
    )
    return found


TARGETS: Mapping[str, tuple[Target, ...]] = MappingProxyType(_targets())
"""Case -> its targets, on two cores with AVX-512."""
