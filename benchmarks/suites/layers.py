"""Layers of networks: batches, channels, strides, groups."""

from __future__ import annotations

import convpar

from .common import prepared


class Layers:
    """The chooser's pick."""

    params = (
        "network-1-n100",
        "network-2-n100",
        "network-1-n1000",
        "network-2-n1000",
        "resnet-64-64-56x56-k3-n16",
        "resnet-64-64-56x56-k3-n16-normwise",
        "resnet-256-256-14x14-k3-n16",
        "resnet-3-64-224x224-k7-s2-n16",
        "depthwise-96-56x56-k3-n16",
        "depthwise-96-56x56-k7-n16",
        "depthwise-128-56x56-k31-n4",
        "depthwise-128-56x56-k31-n4-normwise",
        "mobilenet-128-56x56-k3-s2-n16",
        "deepbench-64-64-54x54-k3-n8",
        "vgg-64-64-224x224-k3-n1",
    )
    param_names = ("case",)

    def setup(self, case: str) -> None:
        self.x, self.w, self.out, self.keywords = prepared(case, "auto")

    def time_conv2d(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)

    def peakmem_conv2d(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)
