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
    """A kind of matrix product.

    Attributes:
        subscripts: As for `jnp.einsum`, with the axes g of a batch, k of the terms, p
            and q of the results.
        k: How many terms there are.
        p: Rows of the result.
        q: Columns of the result.
    """

    subscripts: str
    k: int
    p: int
    q: int

    def __str__(self) -> str:
        """Return the subscripts and the sizes."""
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
    """The error of one kind of product on a device.

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
        """Return the outcome in one line."""
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

    Yields:
        One outcome for each product.

    Privacy:
        Touches no data.
    """
    dtype = np.dtype(dtype)
    for product in products:
        compute = jax.jit(functools.partial(multiply, product.subscripts))
        first, second = product.subscripts.split("->")[0].split(",")
        found = []
        for names, left, right in _factors(product, dtype):
            with jax.enable_x64(dtype == np.float64):
                # Axes that are left out of the subscripts have one entry.
                one = jax.device_put(np.einsum(f"gkp->{first}", left))
                other = jax.device_put(np.einsum(f"gkq->{second}", right))
                result = jax.device_get(compute(one, other))
            shape = len(left), product.p, product.q
            ratios = _ratios(result.reshape(shape), left, right)
            found += zip(ratios, names, strict=True)
        ratio, case = max(found)
        yield ProductError(product, dtype.name, ratio, case)


def check_products(owner: str) -> None:
    """Check that matrix products of the default device are as exact as sums assume.

    A short form of `product_errors`, in float32 and, where it is enabled, in float64;
    once for each device of a process. May be called where a program is traced.

    Args:
        owner: What an error names.

    Raises:
        ValueError: A product is off by more than floating-point multiply-adds allow.

    Privacy:
        Touches no data.
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
    """Return the largest `ProductError` of the short form of the check."""
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
    """Return a tuple of dtype names: float32, and float64 if it is enabled."""
    wide = jnp.result_type(float) == np.float64
    return ("float32", "float64") if wide else ("float32",)


def _ratios(computed, left, right) -> list[float]:
    """Return a list of the largest error over the bound, one for each matrix."""
    info = np.finfo(left.dtype)
    if left.dtype == np.float64:  # slow to add exactly: some entries stand for all
        rows, columns = (_spread(v.shape[2], 8) for v in (left, right))
        left, right = left[..., rows], right[..., columns]
        computed = computed[:, rows][..., columns]
    errors, magnitudes = _exact_errors(computed, left, right)
    terms = np.count_nonzero(left.any(axis=2), axis=1)  # zeros are added exactly
    rounding = terms[:, None, None] * float(info.eps) / 2
    bounds = rounding / (1 - rounding) * magnitudes
    bounds += 3 * left.shape[1] * float(info.tiny)
    ratios = np.where(np.isfinite(computed), errors / bounds, math.inf)
    return ratios.max(axis=(1, 2)).tolist()


def _exact_errors(computed, left, right) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: errors, rounded up, and sums of the terms' absolute values."""
    rows, columns = left.swapaxes(1, 2).astype(float), right.astype(float)
    magnitudes = np.abs(rows) @ np.abs(columns)
    if left.dtype == np.float32:
        # In float64 the terms are exact, and their sum is off by 2**-29 of the bound.
        slack = 1.01 * left.shape[1] * 2.0**-53 * magnitudes
        return np.abs(computed - rows @ columns) + slack, magnitudes
    # Halves of 26 and 27 bits: what their products lose is 2**-105 of a term.
    pairs = _halves(rows[:, :, None]), _halves(columns.swapaxes(1, 2)[:, None])
    terms = np.concatenate([a * b for a in pairs[0] for b in pairs[1]], axis=-1)
    terms = np.concatenate([terms, -np.nan_to_num(computed)[..., None]], axis=-1)
    errors = np.apply_along_axis(math.fsum, -1, terms)
    return np.abs(errors), magnitudes


def _spread(count: int, most: int) -> np.ndarray:
    """Return an array of at most `most` indices, spread evenly over a range."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def _halves(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper 26 bits of a float64, and the rest."""
    upper = (value.view(np.int64) & ~np.int64(2**27 - 1)).view(np.float64)
    return upper, value - upper


def _factors(product: Product, dtype: np.dtype) -> Iterator[tuple]:
    """Yield batches (names, left, right) of factors, (g, k, p) and (g, k, q)."""
    random = np.random.default_rng(0)
    cases = {}
    for name, make in _CASES.items():
        factors = make(product, np.finfo(dtype), random)
        cases[name] = tuple(np.asarray(v, dtype) for v in factors)
    batches = [list(cases)] if "g" in product.subscripts else [[name] for name in cases]
    for names in batches:
        left, right = zip(*(cases[name] for name in names), strict=True)
        yield names, np.stack(left), np.stack(right)


def _equal(product: Product, info, random) -> tuple:
    """Return a pair of factors with equal terms: roundings go in one direction."""
    left, right = (_significands(n, info, random) for n in (product.p, product.q))
    return np.tile(left, (product.k, 1)), np.tile(right, (product.k, 1))


def _few(product: Product, info, random) -> tuple:
    """Return a pair of factors with few equal terms, which hide no factor's error."""
    left, right = _equal(product, info, random)
    kept = np.isin(np.arange(product.k), _spread(product.k, _FEW))
    return left * kept[:, None], right


def _mixed(product: Product, info, random) -> tuple:
    """Return a pair of factors with random bits, signs and exponents."""
    left, right = _random(product, info, random)
    return tuple(np.ldexp(v, random.integers(-3, 4, v.shape)) for v in (left, right))


def _counterweights(product: Product, info, random) -> tuple:
    """Return a pair of factors, huge times tiny: no row has a common exponent."""
    reach = info.maxexp // 2 - 4
    exponents = random.integers(-reach, reach + 1, (product.k, 1))
    left, right = _random(product, info, random)
    return np.ldexp(left, exponents), np.ldexp(right, -exponents)


def _cancelling(product: Product, info, random) -> tuple:
    """Return a pair of factors whose terms are random and cancel, in random order."""
    half, order = product.k // 2, random.permutation(product.k)
    left, right = _random(product, info, random)
    left[half : 2 * half], right[half : 2 * half] = left[:half], -right[:half]
    return left[order], right[order]


def _swamped(product: Product, info, random) -> tuple:
    """Return a pair of factors: a term of one, and others below its last bit."""
    small = (1 - info.eps / 2) * info.eps * np.where(np.arange(product.p) % 2, 1, 0.5)
    ones = np.arange(product.k)[:, None] == np.arange(product.p) * 7 % product.k
    right = np.ldexp(1.0, np.arange(product.q) % 8)
    return np.where(ones, 1, small), np.tile(right, (product.k, 1))


def _tiny(product: Product, info, random) -> tuple:
    """Return a pair of factors from below the smallest normal number to well above."""
    left, right = _random(product, info, random)
    levels = (5 * np.arange(product.p) + 16) % 37 - 6  # the first is above
    return np.ldexp(left, levels + info.minexp), right / 2


_CASES: dict[str, Callable[..., tuple]] = {
    "equal terms": _equal,
    "few terms": _few,
    "random numbers": _mixed,
    "huge times tiny": _counterweights,
    "cancelling terms": _cancelling,
    "small after large": _swamped,
    "tiny numbers": _tiny,
}


def _random(product: Product, info, random) -> tuple[np.ndarray, np.ndarray]:
    """Return two factors of numbers in (-2, -1] and [1, 2) with random bits."""

    def numbers(columns):
        bits = random.integers(0, 2**info.nmant, (product.k, columns))
        return random.choice((-1.0, 1.0), bits.shape) * (1 + bits * float(info.eps))

    return numbers(product.p), numbers(product.q)


def _significands(count: int, info, random) -> np.ndarray:
    """Return numbers in [1, 2): near roundings to 7 to 48 bits, then random ones."""
    eps = float(info.eps)
    # The first serves alone if a product has one column: all reduce it.
    places = (11, 8, 10, 7, 23, 24, 48)
    cuts = [1 + 2.0**-place - odd * eps for place in places for odd in (3, 1)]
    known = [c for c in cuts if 1 < c] + [1 + eps, 2 - eps]
    found = 1 + random.integers(0, 2**info.nmant, count) * eps
    found[: len(known)] = known[:count]
    return found
