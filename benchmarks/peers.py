"""The hypergradients of JAXopt and optimistix, as candidates of the benchmarks."""

import functools
import warnings

import jax
import jax.numpy as jnp
import lineax
import optimistix

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import jaxopt


def mean_loss(loss, public, x, y, rows):
    mean = jnp.mean(jax.vmap(lambda row: loss(x, y, row))(rows))
    return mean if public is None else mean + public(x, y)


def objectives(problem):
    """Return the mean losses of the lower and the upper level, y first."""

    def lower(y, x, data):
        return mean_loss(problem.lower, problem.lower_public, x, y, data.lower)

    def upper(y, x, data):
        return mean_loss(problem.upper, problem.upper_public, x, y, data.upper)

    return lower, upper


def jaxopt_at(problem, solve=None):
    """JAXopt's hypergradient at a given lower solution."""
    lower, upper = objectives(problem)
    keywords = {} if solve is None else {"solve": solve}
    root = jaxopt.implicit_diff.custom_root(jax.grad(lower), **keywords)
    solution = root(lambda y, x, data: y)

    def run(x, y, data):
        return jax.grad(lambda x: upper(solution(y, x, data), x, data))(x)

    return run


def conjugate_gradients(steps):
    return functools.partial(jaxopt.linear_solve.solve_cg, maxiter=steps, tol=0.0)


def through(problem, solve):
    """Return the gradient of the upper level through `solve(x, y0, data)`."""
    upper = objectives(problem)[1]

    def run(x, y0, data):
        return jax.grad(lambda x: upper(solve(x, y0, data), x, data))(x)

    return run


def by_jaxopt(problem, **settings):
    lower = objectives(problem)[0]

    def solve(x, y0, data):
        solver = jaxopt.LBFGS(lower, maxiter=500, tol=1e-6, **settings)
        return solver.run(y0, x, data).params

    return through(problem, solve)


def by_optimistix(problem, tolerance=1e-7, **settings):
    lower = objectives(problem)[0]

    def solve(x, y0, data):
        with jax.numpy_dtype_promotion("standard"):
            return optimistix.minimise(
                lambda y, args: lower(y, *args),
                optimistix.LBFGS(tolerance, tolerance),
                y0,
                (x, data),
                max_steps=2000,
                **settings,
            ).value

    return through(problem, solve)


def everybody(problem):
    """Solvers of the lower level with their implicit derivatives, by name."""
    by_cg = {
        "adjoint": optimistix.ImplicitAdjoint(lineax.CG(1e-5, 1e-5)),
        "tags": frozenset({lineax.positive_semidefinite_tag}),
    }
    solve_cg = jaxopt.linear_solve.solve_cg
    return {
        "JAXopt LBFGS, default": by_jaxopt(problem),
        "JAXopt LBFGS, solve_cg": by_jaxopt(problem, implicit_diff_solve=solve_cg),
        "optimistix LBFGS, default": by_optimistix(problem),
        "optimistix LBFGS, lineax.CG": by_optimistix(problem, **by_cg),
    }
