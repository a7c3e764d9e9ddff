"""Whether the arithmetic of a device is what the guarantee assumes."""

import dataclasses

import jax
from jax.extend.backend import get_default_device

from ..privacy.products import (
    REMEDY,
    ProductError,
    dtypes,
    product_errors,
)


@dataclasses.dataclass(frozen=True)
class DeviceArithmetic:
    """How far matrix products are off on a device.

    Attributes:
        device: Its name and platform.
        versions: The releases of JAX and of the platform.
        errors: The outcome for each kind of product.
    """

    device: str
    versions: str
    errors: tuple[ProductError, ...]

    @property
    def passed(self) -> bool:
        """Whether every product was within its bound: not a proof."""
        return all(error.passed for error in self.errors)

    def __str__(self) -> str:
        """The outcome, one product a line, and what to do where one fails."""
        head = f"matrix products on {self.device}, {self.versions}"
        verdict = "all within the bound that sums over records assume"
        if not self.passed:
            verdict = f"FAILED: sums over records are refused on this device. {REMEDY}"
        return "\n".join([head, *(f"  {error}" for error in self.errors), verdict])


def device_arithmetic() -> DeviceArithmetic:
    r"""Looks for matrix products that the default device rounds too coarsely.

    Sums over records assume that a product of $m$ terms is off by no more than
    floating-point multiply-adds in any order, $\gamma_m \sum_i |a_i b_i|$. Here
    products of the shapes that the library uses are computed on the device, from fixed
    factors made to break that bound, and compared with exact ones. In float32, and in
    float64 where it is enabled. `solve` and `dpbilevel run` refuse a device on which a
    short form of this fails.

    Returns:
        The largest errors over the bound: above 1 they refute it, below 1 they do not
        prove it.

    Privacy:
        Touches no data.
    """
    device = get_default_device()
    version = " ".join(device.client.platform_version.split())
    return DeviceArithmetic(
        f"{device.device_kind} ({device.platform})",
        f"JAX {jax.__version__}, platform {version}",
        tuple(error for dtype in dtypes() for error in product_errors(dtype)),
    )
