"""Tests of whether the arithmetic of a device is what the guarantee assumes."""

import dataclasses

import jax
from jax.extend.backend import get_default_device

from ..privacy.exact.matmul_check import REMEDY, ProductError, dtypes, product_errors
from ..privacy.per_example.mixing import FUNCTIONS, mixed_rows


@dataclasses.dataclass(frozen=True)
class DeviceArithmetic:
    """Result of the device tests: errors of matrix products, and mixed records.

    Attributes:
        device: Its name and platform.
        versions: The releases of JAX and of the platform.
        errors: The outcome for each kind of product.
        mixed: The operations in which one record changes what is computed from others.
    """

    device: str
    versions: str
    errors: tuple[ProductError, ...]
    mixed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all products and operations passed, which is no proof."""
        return not self.mixed and all(error.passed for error in self.errors)

    def __str__(self) -> str:
        """Return the outcome, one product a line, with advice if one failed."""
        head = f"matrix products on {self.device}, {self.versions}"
        verdict = "all within the bound that sums over records assume"
        if not all(error.passed for error in self.errors):
            verdict = f"FAILED: sums over records are refused on this device. {REMEDY}"
        rows = f"no record changes another's values in {', '.join(FUNCTIONS)}"
        if self.mixed:
            rows = (
                "FAILED: records change each other's values in "
                f"{', '.join(self.mixed)}. Use another device or release of JAX."
            )
        lines = (f"  {error}" for error in self.errors)
        return "\n".join([head, *lines, verdict, rows])


def device_arithmetic() -> DeviceArithmetic:
    r"""Test whether the default device rounds products coarsely or mixes records.

    Sums over records assume that a product of $m$ terms is off by no more than
    floating-point multiply-adds in any order, $\gamma_m \sum_i |a_i b_i|$. Here
    products of the shapes that the library uses are computed on the device, from fixed
    factors made to break that bound, and compared with exact ones. In float32, and in
    float64 where it is enabled. `solve` and `dpbilevel run` refuse a device on which a
    short form of this fails. One record of NaN, infinity or large numbers must also
    leave what is computed from all other records as it is, in a few operations.

    Returns:
        The largest errors over the bound: above 1 they refute it, below 1 they do not
        prove it. And the operations that mixed records.

    Privacy:
        Touches no data.
    """
    device = get_default_device()
    version = " ".join(device.client.platform_version.split())
    return DeviceArithmetic(
        f"{device.device_kind} ({device.platform})",
        f"JAX {jax.__version__}, platform {version}",
        tuple(error for dtype in dtypes() for error in product_errors(dtype)),
        mixed_rows(),
    )
