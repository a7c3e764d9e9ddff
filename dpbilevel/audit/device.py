"""Tests of the arithmetic of a device, which the guarantee rests on."""

import dataclasses

import jax
from jax.extend.backend import get_default_device

from ..privacy.exact.matmul_check import REMEDY, ProductError, dtypes, product_errors
from ..privacy.per_example.mixing import FUNCTIONS, mixed_rows


@dataclasses.dataclass(frozen=True)
class DeviceArithmetic:
    """Result of the device tests: errors of matrix products, and mixed records.

    Attributes:
        device: Name and platform of the device.
        versions: Releases of JAX and of the platform.
        errors: Outcome for each kind of product.
        mixed: Operations in which one record changes the values of others.
    """

    device: str
    versions: str
    errors: tuple[ProductError, ...]
    mixed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all products and operations passed; not a proof."""
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
    r"""Return a `DeviceArithmetic`: whether products are coarse or records are mixed.

    Sums over records assume that a product of $m$ terms is off by no more than
    floating-point multiply-adds in any order, $\gamma_m \sum_i |a_i b_i|$. The test
    computes products of the library's shapes on the device, in float32 and, if it is
    enabled, in float64. Their fixed factors are made to break the bound, and the
    results are compared with exact ones. `solve` and `dpbilevel run` refuse a device
    that fails a short form of this test. A few operations must also compute the same
    from all other records if one record is NaN, infinite or large.

    Returns:
        The largest errors over the bound, which refute it above 1 and do not prove it
        below 1, and the operations that mixed records.

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
