"""`convpar explain`: what would run for given shapes and types, and why."""

from __future__ import annotations

import re
from typing import Any

import click

from convpar.boundary import MODES
from convpar.problem import OVERFLOW_RULES, PADDING_NAMES

from .common import (
    CONTEXT_SETTINGS,
    Accuracy,
    Number,
    Numbers,
    UserError,
    backend_options,
    print_json,
    read_config,
    read_dtype,
    read_integer,
    user_errors,
)


class Spec(click.ParamType):  # type: ignore[type-arg]
    """A shape and a type: ``1,3,512,512:uint8``; without a type float32, without a shape one number."""

    name = "spec"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` as (shape, dtype), or click's error."""
        if not isinstance(value, str):
            return value
        shape, _, dtype = value.partition(":")
        if not re.fullmatch(r"(\d+([,x]\d+)*)?", shape):
            self.fail(
                f"{value!r} must be sizes with commas between and a type, such as 1,3,512,512:uint8",
                param,
                ctx,
            )
        try:
            sizes = tuple(read_integer(n) for n in re.split("[,x]", shape) if n)
        except ValueError as e:
            self.fail(str(e), param, ctx)
        return sizes, read_dtype(dtype or "float32")


@click.command("explain", context_settings=CONTEXT_SETTINGS)
@click.option("--x", "image", type=Spec(), required=True, metavar="SHAPE[:DTYPE]",
              help="The image: H,W or C,H,W or N,C,H,W; the type is float32 if none is given.")  # fmt: skip
@click.option("--w", "weights", type=Spec(), required=True, metavar="SHAPE[:DTYPE]",
              help="The filter: KH,KW or OC,C/groups,KH,KW.")  # fmt: skip
@click.option("--bias", type=Spec(), metavar="[OC][:DTYPE]", help="A bias: one number, or one a channel.")
@click.option("--stride", type=Numbers(1, 2), default="1", metavar="S[,S]", help="Rows, columns.")
@click.option("--padding", type=Numbers(1, 2, 4, words=PADDING_NAMES), default="valid", metavar="P",
              help="valid, same, full, P, ROWS,COLUMNS or TOP,BOTTOM,LEFT,RIGHT.")  # fmt: skip
@click.option("--dilation", type=Numbers(1, 2), default="1", metavar="D[,D]", help="1 is dense.")
@click.option("--groups", type=int, default=1, metavar="G")
@click.option("--boundary", type=click.Choice(MODES), default="fill", show_default=True)
@click.option("--fillvalue", type=Number(), default=0, metavar="V")
@click.option("--flip", is_flag=True, help="Convolution rather than cross-correlation.")
@click.option("--channels-last", is_flag=True, help="The image is H,W,C or N,H,W,C.")
@click.option(
    "--dtype", metavar="DTYPE", help="Type of the result (default: that of image and filter together)."
)
@click.option("--overflow", type=click.Choice(OVERFLOW_RULES), default="wrap", show_default=True)
@click.option("--accuracy", type=Accuracy(), metavar="A", help="elementwise, normwise or a number.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="Where the arrays live.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="What was considered, for programs to read.")
@backend_options
def command(
    image: Any, weights: Any, bias: Any, channels_last: bool, dtype: str | None, device: str, as_json: bool,
    backend: str, pairs: tuple[str, ...], threads: int | None, **arguments: Any,
) -> None:  # fmt: skip
    """Say what would run for arrays of these shapes and types, and why. No array is made.

    \b
    convpar explain --x 1,3,512,512:uint8 --w 3,3:float32 --padding same --dtype uint8
    """
    import convpar
    from convpar.backend import Device

    place = Device(device, 0)  # type: ignore[arg-type]
    with user_errors():
        x, w, b = (
            None if spec is None else convpar.ArraySpec(spec[0], spec[1], place)
            for spec in (image, weights, bias)
        )
        explanation = convpar.explain(
            x, w, b, channel_axis=-1 if channels_last else None, backend=backend,
            config=read_config(pairs), num_threads=threads, dtype=None if dtype is None else read_dtype(dtype),
            **arguments,
        )  # fmt: skip
    if as_json:
        print_json(
            {
                "backend": explanation.backend,
                "considered": [{"name": name, "reason": reason} for name, reason in explanation.considered],
            }
        )
    else:
        click.echo(str(explanation))
    if explanation.backend is None:
        raise UserError("no backend can do this")
