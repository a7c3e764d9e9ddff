r"""Matrix products as a device computes them: what sums assume, and a test of it.

A product of $m$ terms, added in any order by floating-point multiply-adds, fused or
not, satisfies

$$
\Bigl|\mathrm{fl}\Bigl(\sum_i a_i b_i\Bigr) - \sum_i a_i b_i\Bigr| \le
\gamma_m \sum_i |a_i b_i| + 3 m \tau, \qquad \gamma_m = \frac{m u}{1 - m u},
$$

with $u$ half the spacing of floats at 1 ($2^{-24}$ in float32). $\tau$ is the smallest
normal number ($2^{-126}$): devices may take smaller ones for zero, factors, terms and
sums alike. A factor below $\tau$ must therefore meet one of at most 1.

Matrix units that round the factors first (to TF32, in passes of bfloat16) are off by
more. The library asks for precision "highest". Whether a device then keeps the bound is
tested here, on products made for it to fail. The test is finite: it can refute the
bound and does not prove it.

References:
    Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1.
"""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_default_device
from jax.typing import DTypeLike
from jaxtyping import Array

# The least number of terms other than zero: one or two are off by more than their bound
# in six passes of bfloat16, as accurate as float32 in every longer sum.
_FEW = 4
Multiply = Callable[[str, Array, Array], Array]


class Product(NamedTuple):
    """A kind of matrix product: of k terms, with a result of p rows and q columns.

    The subscripts are those of `jnp.einsum`, with these axes and g of a batch.
    """

    subscripts: str
    k: int
    p: int
    q: int

    def __str__(self) -> str:
        return f"{self.subscripts} k={self.k} p={self.p} q={self.q}"


# Group sums of factors, also of few columns, group sums of dense rows, Gram matrices,
# as the clipped mean computes them; sizes for which backends have different programs.
PRODUCTS = (
    Product("gkp,gkq->gpq", 64, 128, 128),
    Product("gk,gkq->gq", 64, 1, 1024),
    Product("gkp,gkq->gpq", 4, 128, 128),
    Product("gkp,gkq->gpq", 8, 8, 8),
    Product("gkp,gkq->gpq", 64, 128, 784),
    Product("gkp,gkq->gpq", 256, 10, 784),
    Product("gkp,gkq->gpq", 256, 1, 128),
    Product("gkp,gkq->gpq", 4096, 64, 64),
    Product("kp,kq->pq", 256, 784, 128),
    Product("kp,kq->pq", 4096, 128, 128),
    Product("gk,gkq->gq", 256, 1, 784),
    Product("kp,k->p", 256, 784, 1),
    Product("pk,qk->pq", 784, 16, 16),
    Product("pk,qk->pq", 512, 128, 128),
    Product("gpk,gqk->gpq", 128, 16, 16),
)
REMEDY = (
    "Use another device, for example the CPU with JAX_PLATFORMS=cpu, or another "
    "release of JAX or of the driver, and remove variables and flags that admit "
    "reduced precision; NVIDIA_TF32_OVERRIDE=0 forbids TF32. JAX's default matmul "
    "precision makes no difference."
)
_BEFORE_SUMS = PRODUCTS[:2]  # cheap, and of shapes that matrix units take


@dataclasses.dataclass(frozen=True)
class ProductError:
    """Largest error of one kind of matrix product on a device, in units of its bound.

    Attributes:
        product: The kind.
        dtype: Of the factors and the result.
        ratio: The largest error over what floating-point multiply-adds allow; infinite
            where a result is not finite.
        case: The kind of factors for which it was largest.
    """

    product: Product
    dtype: str
    ratio: float
    case: str

    @property
    def passed(self) -> bool:
        """Whether every result was within the bound: not a proof."""
        return self.ratio <= 1

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}  {self.dtype}  {self.product!s:32}  largest error "
            f"{self.ratio:8.3g} of the bound ({self.case})"
        )


# The einsum of two arrays in highest precision, whatever the default.
highest = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def product_errors(
    dtype: DTypeLike = jnp.float32,
    products: tuple[Product, ...] = PRODUCTS,
    multiply: Multiply = highest,
) -> Iterator[ProductError]:
    """Yield a `ProductError` for each kind of matrix product on the default device.

    The factors are fixed numbers whose last bits matter: patterns that reduced
    precision rounds in one direction, random ones, exponents far apart, sums that
    cancel or lose small terms, and values at the end of the range. What is exact is
    computed on the host.

    Args:
        dtype: float32 or float64.
        products: What to multiply.
        multiply: How, as `jnp.einsum`; runs under `jax.jit`.
    """
    dtype = np.dtype(dtype)
    info = np.finfo(dtype)
    for product in products:
        compute = jax.jit(functools.partial(multiply, product.subscripts))
        first, second = product.subscripts.split("->")[0].split(",")
        found = []
        for names, left, right in _factors(product, dtype):
            with jax.enable_x64(dtype == np.float64):
                # Axes that are left out of the subscripts have one entry.
                one = jax.device_put(np.einsum(f"gkp->{first}", left))
                other = jax.device_put(np.einsum(f"gkq->{second}", right))
                computed = jax.device_get(compute(one, other))
            computed = computed.reshape(len(left), product.p, product.q)
            if dtype == np.float64:  # slow to add exactly: some entries stand for all
                spread = (np.linspace(0, v.shape[2] - 1, 8) for v in (left, right))
                rows, columns = (np.unique(v.astype(int)) for v in spread)
                left, right = left[..., rows], right[..., columns]
                computed = computed[:, rows][..., columns]
            errors, magnitudes = _exact_errors(computed, left, right)
            terms = np.count_nonzero(left.any(axis=2), axis=1)  # zeros add no error
            rounding = terms[:, None, None] * float(info.eps) / 2
            bounds = rounding / (1 - rounding) * magnitudes
            bounds += 3 * product.k * float(info.tiny)
            ratios = np.where(np.isfinite(computed), errors / bounds, math.inf)
            found += zip(ratios.max(axis=(1, 2)).tolist(), names, strict=True)
        ratio, case = max(found)
        yield ProductError(product, dtype.name, ratio, case)


def check_products(owner: str) -> None:
    """Raise `ValueError` if the default device's matrix products are too inexact.

    A short form of `product_errors`, in float32 and, where it is enabled, in float64;
    once for each device of a process. May be called where a program is traced.

    Raises:
        ValueError: A product is off by more than multiply-adds allow; names `owner`.
    """
    device = get_default_device()
    worst = max((_worst(device, v) for v in dtypes()), key=lambda error: error.ratio)
    if worst.passed:
        return
    raise ValueError(
        f"{owner}: on {device.device_kind} ({device.platform}, JAX {jax.__version__}), "
        f"products in {worst.dtype} err by {worst.ratio:.3g} times the bound. {REMEDY}"
    )


@functools.cache
def _worst(device: Any, dtype: str) -> ProductError:
    """Return a device's largest `ProductError` in the short check, computed once."""
    errors = apart(device, lambda: [*product_errors(dtype, _BEFORE_SUMS)])
    return max(errors, key=lambda error: error.ratio)


def apart(device: Any, fun: Callable[[], Any]) -> Any:
    """Call a function on a device, without the caller's contexts; return its result.

    A thread of its own has none of them: no program that is being traced, no mesh.
    """

    def run() -> Any:
        with jax.default_device(device):
            return fun()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def dtypes() -> tuple[str, ...]:
    """Return a tuple of dtypes to test, by name: float32; float64 if JAX has x64."""
    wide = jnp.result_type(float) == np.float64
    return ("float32", "float64") if wide else ("float32",)


def _exact_errors(computed, left, right) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: errors, rounded up, and sums of the terms' absolute values."""
    rows, columns = left.swapaxes(1, 2).astype(float), right.astype(float)
    magnitudes = np.abs(rows) @ np.abs(columns)
    if left.dtype == np.float32:
        # In float64 the terms are exact, and their sum is off by 2**-29 of the bound.
        slack = 1.01 * left.shape[1] * 2.0**-53 * magnitudes
        return np.abs(computed - rows @ columns) + slack, magnitudes
    # Halves of 26 and 27 bits: what their products lose is 2**-105 of a term.
    pairs = []
    for v in (rows[:, :, None], columns.swapaxes(1, 2)[:, None]):
        upper = (v.view(np.int64) & ~np.int64(2**27 - 1)).view(np.float64)
        pairs.append((upper, v - upper))
    terms = np.concatenate([a * b for a in pairs[0] for b in pairs[1]], axis=-1)
    terms = np.concatenate([terms, -np.nan_to_num(computed)[..., None]], axis=-1)
    errors = np.apply_along_axis(math.fsum, -1, terms)
    return np.abs(errors), magnitudes


def _factors(product: Product, dtype: np.dtype) -> Iterator[tuple]:
    """Yield batches (names, left, right) of test factors, (g, k, p) and (g, k, q).

    A name says what is special about a pair.
    """
    random, info = np.random.default_rng(0), np.finfo(dtype)
    k, p, q, eps = product.k, product.p, product.q, float(info.eps)
    # Numbers near roundings to 7 to 48 bits. The first serves alone if a product has
    # one column: all reduce it.
    places = (11, 8, 10, 7, 23, 24, 48)
    cuts = [1 + 2.0**-place - odd * eps for place in places for odd in (3, 1)]
    known = [c for c in cuts if 1 < c] + [1 + eps, 2 - eps]

    def equal(columns):
        """Return equal rows of numbers in [1, 2): roundings go in one direction."""
        row = 1 + random.integers(0, 2**info.nmant, columns) * eps
        row[: len(known)] = known[:columns]
        return np.tile(row, (k, 1))

    def numbers(columns):
        """Return numbers in (-2, -1] and [1, 2) with random bits."""
        bits = random.integers(0, 2**info.nmant, (k, columns))
        return random.choice((-1.0, 1.0), bits.shape) * (1 + bits * eps)

    cases = {"equal terms": (equal(p), equal(q))}
    # Few equal terms hide no factor's error.
    kept = np.isin(np.arange(k), np.linspace(0, k - 1, _FEW).astype(int))
    cases["few terms"] = equal(p) * kept[:, None], equal(q)
    left, right = numbers(p), numbers(q)
    left, right = (np.ldexp(v, random.integers(-3, 4, v.shape)) for v in (left, right))
    cases["random numbers"] = left, right
    # No row has a common exponent.
    reach = info.maxexp // 2 - 4
    exponents = random.integers(-reach, reach + 1, (k, 1))
    left, right = numbers(p), numbers(q)
    cases["huge times tiny"] = np.ldexp(left, exponents), np.ldexp(right, -exponents)
    half, order = k // 2, random.permutation(k)
    left, right = numbers(p), numbers(q)
    left[half : 2 * half], right[half : 2 * half] = left[:half], -right[:half]
    cases["cancelling terms"] = left[order], right[order]
    # A term of one, and others below its last bit.
    small = (1 - info.eps / 2) * info.eps * np.where(np.arange(p) % 2, 1, 0.5)
    ones = np.arange(k)[:, None] == np.arange(p) * 7 % k
    right = np.tile(np.ldexp(1.0, np.arange(q) % 8), (k, 1))
    cases["small after large"] = np.where(ones, 1, small), right
    # From below the smallest normal number to well above.
    left, right = numbers(p), numbers(q)
    levels = (5 * np.arange(p) + 16) % 37 - 6  # the first is above
    cases["tiny numbers"] = np.ldexp(left, levels + info.minexp), right / 2
    batches = [list(cases)] if "g" in product.subscripts else [[name] for name in cases]
    for names in batches:
        sides = zip(*(cases[name] for name in names), strict=True)
        left, right = (np.stack(v).astype(dtype) for v in sides)
        yield names, left, right
