"""PyTorch's conv2d, on the CPU (oneDNN) and on a GPU (cuDNN), in both memory layouts."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from convpar.cases import Case
from convpar.problem import Problem
from convpar.timing import GpuTimer

from . import ONE_THREAD, SMALL, Array, Cannot, Job, correlated, is_plane, keep

_TF32 = ", TF32"
# Types that oneDNN convolves without writing every patch to memory first.
_ONEDNN = ("float32", "float16", "bfloat16")


class _Torch:
    """Inputs lie in the layout before the clock starts; no output array can be given."""

    device: Literal["cpu", "cuda"]

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        try:
            import torch
        except ImportError as e:
            raise Cannot(f"not installed: {e}") from e
        self._torch = torch
        torch.set_num_threads(num_threads)

    def settings(self, case: Case) -> list[str]:
        """Both layouts; for small problems also with one thread, on a GPU also with TF32."""
        p = case.problem()
        if any(p.padding) and (p.boundary != "fill" or p.fillvalue):
            raise Cannot("conv2d pads with zeros only")
        if self._takes_bytes(p):
            return ["NCHW", "channels-last"]
        if p.x_dtype != p.w_dtype or p.out_dtype != p.x_dtype:
            raise Cannot("image, filter and result of one type only")
        if p.x_dtype.name not in ("float16", "float32", "float64"):
            raise Cannot(f"no convolution of {p.x_dtype}")
        self._room_for_patches(p)
        layouts = ["NCHW", "channels-last"]
        if self.device == "cpu":
            return layouts + (
                [f"{s}{ONE_THREAD}" for s in layouts] if p.macs < SMALL and self._num_threads > 1 else []
            )
        return layouts + ([f"{s}{_TF32}" for s in layouts] if p.x_dtype == np.float32 else [])

    def _takes_bytes(self, p: Problem) -> bool:
        """Whether oneDNN's convolution of quantised layers gives the sums: of bytes, unscaled, as floats."""
        types = p.x_dtype.name, p.w_dtype.name, p.out_dtype.name
        wanted = self.device == "cpu" and types == ("uint8", "int8", "int32")
        available: Any = self._torch.backends.mkldnn.is_available
        return wanted and bool(available())

    def _room_for_patches(self, p: Problem) -> None:
        """Its fallback writes all patches of an image: tens of gigabytes for one large plane."""
        import os

        if self.device != "cpu" or p.x_dtype.name in _ONEDNN:
            return
        patches = p.terms * p.groups * p.oh * p.ow * p.x_dtype.itemsize
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if patches > room // 2:
            raise Cannot(f"writes out {patches / 1e9:.0f} GB of patches, {room / 1e9:.0f} GB are free")

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """Uneven padding is added inside the call, as a user would have to."""
        torch, p = self._torch, case.problem()
        layout, _, extra = setting.partition(", ")
        memory = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}[layout]

        def tensor(a: Array) -> Any:
            return torch.from_numpy(np.ascontiguousarray(a)).to(self.device).contiguous(memory_format=memory)

        xt, wt = tensor(x), tensor(correlated(p, w))
        top, bottom, left, right = p.padding
        even = top == bottom and left == right
        options: dict[str, Any] = {
            "stride": p.stride,
            "padding": (top, left) if even else (0, 0),
            "dilation": p.dilation,
            "groups": p.groups,
        }
        if self._takes_bytes(p):
            return self._of_bytes(p, xt, wt, even)
        conv, pad = torch.nn.functional.conv2d, torch.nn.functional.pad

        def convolve() -> Any:
            with torch.inference_mode():
                return conv(xt if even else pad(xt, (left, right, top, bottom)), wt, **options)

        call, answer = keep(convolve, lambda y: y.contiguous().cpu().numpy(), p)
        try:
            call()
        except RuntimeError as e:
            raise Cannot(str(e).splitlines()[0]) from e
        job = Job(call, answer, notes=() if even else ("pads in the call",))
        self._finish(job, p, extra)
        return job

    def _of_bytes(self, p: Problem, x: Any, w: Any, even: bool) -> Job:
        """Filters are packed before the clock starts."""
        if not even:
            raise Cannot("uneven padding of bytes")
        torch = self._torch
        onednn = torch.ops.onednn
        stride, padding, dilation = list(p.stride), [p.padding[0], p.padding[2]], list(p.dilation)
        scales, zeros = torch.ones(p.oc), torch.zeros(p.oc, dtype=torch.long)
        packed = onednn.qconv_prepack(w, scales, 1.0, 0, stride, padding, dilation, p.groups, list(x.shape))

        def convolve() -> Any:
            return onednn.qconv2d_pointwise(
                x, 1.0, 0, packed, scales, zeros, None, stride, padding, dilation, p.groups,
                1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip

        call, answer = keep(convolve, lambda y: y.contiguous().numpy().astype(np.int32), p)
        call()
        job = Job(call, answer, notes=("returns float32", "filters packed before"))
        self._finish(job, p, "")
        return job

    def _finish(self, job: Job, p: Problem, extra: str) -> None:
        raise NotImplementedError


class TorchCpu(_Torch):
    """oneDNN where it has the type."""

    device = "cpu"

    def about(self) -> dict[str, Any]:
        """Version, threads in use and whether oneDNN is there."""
        torch = self._torch
        backend = "oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN"
        return {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "mode": f"{backend}, {torch.backends.cpu.get_cpu_capability()}; inputs already in the layout",
        }

    def _finish(self, job: Job, p: Problem, extra: str) -> None:
        threads = 1 if extra else self._num_threads
        job.threads = threads
        job.before = lambda: self._torch.set_num_threads(threads)
        if is_plane(p):
            job.notes += ("as a (1, 1, H, W) tensor",)


class TorchCuda(_Torch):
    """cuDNN, letting it time its algorithms first; timed with CuPy's events on torch's stream."""

    device = "cuda"

    def about(self) -> dict[str, Any]:
        """Version and the cuDNN in use."""
        torch = self._torch
        if not torch.cuda.is_available():
            raise Cannot("torch sees no GPU")
        torch.backends.cudnn.benchmark = True
        return {
            "version": torch.__version__,
            "threads": 0,
            "mode": f"cuDNN {torch.backends.cudnn.version()}, algorithms timed first; inputs already in the layout",
        }

    def _finish(self, job: Job, p: Problem, extra: str) -> None:
        import cupy

        torch, tf32 = self._torch, bool(extra)

        def allow() -> None:
            torch.backends.cudnn.allow_tf32 = tf32

        job.before = allow
        job.timer = GpuTimer(cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream))
        # Winograd and FFT are among cuDNN's algorithms; TF32 keeps 11 of 24 bits of each factor.
        job.contract, job.factor = "normwise", 2.0**13 if tf32 else 16.0
        if p.x_dtype == np.float16:
            job.factor = 2.0**13
