"""A function of one record for every primitive that functions of records may use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.extend.random import threefry_2x32


def square(v):
    """A symmetric positive definite matrix, where the record is finite."""
    matrix = v[:16].reshape(4, 4)
    return matrix @ matrix.T + jnp.eye(4, dtype=v.dtype)


def whole(v):
    return lax.bitcast_convert_type(v, jnp.int32)


def bits(v):
    return lax.bitcast_convert_type(v, jnp.uint32)


def threefry(v):
    return jax.random.wrap_key_data(bits(v[:2]), impl="threefry2x32")


def unit(v):
    return jnp.tanh(v) * 0.9


def both(fun, first=unit):
    return lambda v: fun(first(v), first(v[::-1]))


def scattered(name):
    at = jnp.arange(32) % 8
    return lambda v: getattr(jnp.ones(8, v.dtype).at[at], name)(v)


def pooled(v):
    def loss(v):
        return jnp.sum(
            lax.reduce_window(v, -jnp.inf, lax.max, (2,), (2,), "VALID") ** 2
        )

    return jax.grad(loss)(v)


def pooled_twice(v):
    def largest(v):
        return lax.reduce_window(v, -jnp.inf, lax.max, (2,), (2,), "VALID")

    return jax.jvp(largest, (v,), (jnp.sin(v),))[1]


def looped_convolution(v):
    """Gradients of grouped convolutions in a loop."""
    layout = ("NHC", "HIO", "NHC")
    kernel = jnp.linspace(-1, 1, 24).reshape(3, 2, 4)

    def loss(kernel):
        def step(image, _):
            found = lax.conv_general_dilated(
                image, kernel, (1,), "SAME", None, None, layout, feature_group_count=2
            )
            return jnp.tanh(found), None

        return jnp.sum(lax.scan(step, v.reshape(1, 8, 4), None, 2)[0])

    gradient = jax.grad(loss)
    return jax.jvp(gradient, (kernel,), (jnp.ones_like(kernel),))


def convolutions(v):
    """Convolutions with public kernels and with kernels that depend on the record."""
    image, kernel = v.reshape(1, 4, 8), jnp.linspace(-1, 1, 24).reshape(2, 4, 3)
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(1,), padding="SAME"
    )
    own = convolve(jnp.ones((1, 2, 8)), v[:12].reshape(2, 2, 3))
    pair = convolve(image, v[:24].reshape(2, 4, 3))
    slope = jax.grad(lambda kernel: jnp.sum(convolve(image, kernel) ** 2))(kernel)
    batches = convolve(v.reshape(4, 2, 4), v[:16].reshape(2, 2, 4), batch_group_count=2)
    return convolve(image, kernel), own, pair, slope, batches


def callback(v):
    return jax.pure_callback(np.sin, v, v, vmap_method="sequential")


def solved(v):
    return lax.custom_linear_solve(
        lambda x: square(v) @ x,
        v[:4],
        lambda f, b: jax.scipy.sparse.linalg.cg(f, b, maxiter=5)[0],
        symmetric=True,
    )


def solved_on_both_sides(v):
    matrix = jnp.tril(square(v))
    solve = functools.partial(lax.linalg.triangular_solve, left_side=True, lower=True)
    return solve(matrix, v[16:].reshape(4, 4)), solve(jnp.eye(4), v[:8].reshape(4, 2))


def diagonals(v):
    return v[None, :8], 9 + v[None, 8:16], v[None, 16:24]


def tridiagonal_solve(v):
    lower, middle, upper = (d[0] for d in diagonals(v))
    return lax.linalg.tridiagonal_solve(lower, middle, upper, v[24:, None])


def rematerialized(v):
    return jax.grad(lambda v: jnp.sum(jax.checkpoint(lambda v: jnp.sin(v) ** 2)(v)))(v)


def looped(v):
    return lax.while_loop(
        lambda s: (jnp.abs(s) < 2).any(), lambda s: 2 * s + 1, jnp.where(v < 9, v, 1)
    )


@jax.custom_vjp
def doubled(v):
    return 2 * v


doubled.defvjp(lambda v: (2 * v, None), lambda _, slope: (3 * slope,))


def printed(v):
    jax.debug.callback(lambda v: None, v)
    return v * 2


def shown(v):
    jax.debug.print("{}", v[0])
    return v * 2


def closed(v):
    call = primitives.closed_call_p
    params = call.get_bind_params({"call_jaxpr": jax.make_jaxpr(jnp.sin)(v)})
    return call.bind(v, **params)


def sharded(v):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return lax.with_sharding_constraint(v * 2, place)


ENTRIES = {
    name: getattr(lax, name)
    for name in """abs acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos
    cosh cummax cumsum cumlogsumexp cumprod cummin digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt
    square tan tanh acos stop_gradient optimization_barrier""".split()
}
ENTRIES |= {
    name: both(getattr(lax, name))
    for name in """add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max
    min mul ne nextafter polygamma pow rem sub zeta""".split()
}
ENTRIES |= {
    name: both(getattr(lax, lax_name), whole)
    for name, lax_name in {
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "shift_left": "shift_left",
        "shift_right_arithmetic": "shift_right_arithmetic",
        "shift_right_logical": "shift_right_logical",
    }.items()
}
ENTRIES |= {
    f"reduce_{name}": functools.partial(fun)
    for name, fun in {
        "sum": jnp.sum,
        "max": jnp.max,
        "min": jnp.min,
        "prod": jnp.prod,
        "and": lambda v: jnp.all(v > 0),
        "or": lambda v: jnp.any(v > 0),
        "xor": lambda v: lax.reduce_xor(whole(v), (0,)),
    }.items()
}
ENTRIES |= {
    "dot_general": lambda v: (v @ np.eye(32, 8, dtype=np.float32), jnp.outer(v, v)),
    "conv_general_dilated": convolutions,
    "add_any": jax.grad(lambda v: jnp.sum(jnp.sin(v) * v)),
    "bitcast_convert_type": whole,
    "clamp": lambda v: lax.clamp(-1.0, v, 1.0),
    "clz": lambda v: lax.clz(whole(v)),
    "population_count": lambda v: lax.population_count(whole(v)),
    "not": lambda v: ~whole(v),
    "conj": lambda v: jnp.conj(lax.complex(v, v)),
    "real": lambda v: jnp.real(lax.complex(v, v)),
    "imag": lambda v: jnp.imag(lax.complex(v, v)),
    "convert_element_type": lambda v: v.astype(jnp.bfloat16),
    "copy": jnp.copy,
    "integer_pow": lambda v: v**3,
    "reduce_precision": lambda v: lax.reduce_precision(v, 5, 5),
    "regularized_incomplete_beta": lambda v: lax.betainc(
        unit(v) ** 2 + 1, unit(v[::-1]) ** 2 + 1, unit(v) ** 2
    ),
    "select_n": lambda v: jnp.where(v > 0, v, 1.0),
    "name": lambda v: checkpoint_name(v, "v"),
    "broadcast_in_dim": lambda v: jnp.broadcast_to(v, (3, 32)),
    "concatenate": lambda v: jnp.concatenate([v, v[:3]]),
    "device_put": lambda v: jax.device_put(v) * 2,
    "dynamic_slice": lambda v: lax.dynamic_slice(v, (whole(v)[0] % 9,), (3,)),
    "dynamic_update_slice": lambda v: lax.dynamic_update_slice(
        v, v[:3], (whole(v)[0] % 9,)
    ),
    "gather": lambda v: v[whole(v) % 32],
    "pad": lambda v: jnp.pad(v, 2),
    "reshape": lambda v: v.reshape(4, 8),
    "rev": lambda v: v[::-1],
    "slice": lambda v: v[3:9:2],
    "split": lambda v: jnp.split(v, 4),
    "squeeze": lambda v: v[None].squeeze(0),
    "stack": lambda v: jnp.stack([v, v]),
    "tile": lambda v: jnp.tile(v, 3),
    "transpose": lambda v: v.reshape(4, 8).T,
    "unstack": lambda v: jnp.unstack(v.reshape(4, 8)),
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-max": scattered("max"),
    "scatter-min": scattered("min"),
    "scatter-mul": scattered("mul"),
    "scatter-sub": scattered("subtract"),
    "sharding_constraint": sharded,
    "approx_top_k": lambda v: lax.approx_max_k(v, 3),
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "reduce": lambda v: lax.reduce(v, 0.0, lambda a, b: a + b * b, (0,)),
    "reduce_window": lambda v: lax.reduce_window(
        v, 0.0, lambda a, b: a + b * b, (2,), (1,), "SAME"
    ),
    "reduce_window_max": lambda v: lax.reduce_window(
        v, -jnp.inf, lax.max, (2,), (1,), "SAME"
    ),
    "reduce_window_min": lambda v: lax.reduce_window(
        v, jnp.inf, lax.min, (2,), (1,), "SAME"
    ),
    "reduce_window_sum": lambda v: lax.reduce_window(
        v, 0.0, lax.add, (3,), (1,), "SAME"
    ),
    "select_and_scatter_add": pooled,
    "select_and_gather_add": pooled_twice,
    "sort": lambda v: lax.sort((v, v[::-1])),
    "top_k": lambda v: lax.top_k(v, 3),
    "cholesky": lambda v: jnp.linalg.cholesky(square(v)),
    "eig": lambda v: jnp.linalg.eig(square(v))[0],
    "eigh": lambda v: jnp.linalg.eigh(square(v)),
    "fft": lambda v: (jnp.fft.fft(v), jnp.fft.rfft(v), jnp.fft.irfft(v[:17])),
    "householder_product": lambda v: lax.linalg.householder_product(square(v), v[:4]),
    "hessenberg": lambda v: lax.linalg.hessenberg(square(v)),
    "lu": lambda v: lax.linalg.lu(square(v)),
    "lu_pivots_to_permutation": lambda v: lax.linalg.lu_pivots_to_permutation(
        lax.linalg.lu(square(v))[1], 4
    ),
    "qr": lambda v: jnp.linalg.qr(square(v)),
    "schur": lambda v: lax.linalg.schur(square(v)),
    "svd": lambda v: jnp.linalg.svd(square(v)),
    "triangular_solve": solved_on_both_sides,
    "tridiagonal": lambda v: lax.linalg.tridiagonal(square(v)),
    "tridiagonal_solve": tridiagonal_solve,
    "random_bits": lambda v: jax.random.bits(threefry(v), (3,)),
    "random_clone": lambda v: jax.random.key_data(jax.random.clone(threefry(v))),
    "random_fold_in": lambda v: jax.random.key_data(
        jax.random.fold_in(threefry(v), whole(v)[3])
    ),
    "random_gamma": lambda v: jax.random.gamma(threefry(v), unit(v) ** 2 + 1),
    "random_seed": lambda v: jax.random.key_data(jax.random.key(whole(v)[0])),
    "random_split": lambda v: jax.random.key_data(jax.random.split(threefry(v))),
    "random_wrap": lambda v: jax.random.key_data(threefry(v)),
    "random_unwrap": lambda v: jax.random.key_data(threefry(v)),
    "threefry2x32": lambda v: threefry_2x32(
        (bits(v)[0], bits(v)[1]), jnp.arange(8, dtype=jnp.uint32)
    ),
    "one_minus_square": jax.grad(lambda v: jnp.sum(jnp.tanh(v))),
    "call_hi_primitive": lambda v: (
        jnp.searchsorted(jnp.sort(v[:16]), v),
        jnp.searchsorted(jnp.linspace(-1, 1, 5), v),
        jnp.searchsorted(jnp.sort(v), jnp.linspace(-1, 1, 5)),
        jnp.nonzero(v > 0, size=4),
    ),
    "cond": lambda v: lax.cond(v[0] > 0, jnp.sin, jnp.cos, v),
    "custom_jvp_call": jax.nn.relu,
    "custom_vjp_call": doubled,
    "custom_linear_solve": solved,
    "debug_callback": printed,
    "debug_print": shown,
    "jit": lambda v: jax.jit(jnp.sin)(v),
    "pure_callback": callback,
    "remat2": rematerialized,
    "scan": looped_convolution,
    "while": looped,
}
# Primitives that some supported releases of JAX do not have.
if hasattr(lax, "mulhi"):
    ENTRIES["mulhi"] = lambda v: lax.mulhi(whole(v), whole(v[::-1]))
if hasattr(primitives, "log2_p"):
    ENTRIES["log2"] = jnp.log2
if jax.__version_info__ < (0, 12):
    del ENTRIES["call_hi_primitive"]
if not hasattr(primitives, "one_minus_square_p"):
    del ENTRIES["one_minus_square"]
ENTRIES[primitives.closed_call_p.name] = closed  # eval_jaxpr in later releases
