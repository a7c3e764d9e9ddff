"""Bilevel problem: losses of both levels, sets, and checks of its data."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import ClassVar

import equinox as eqx
import jax
from jax.extend.core import Literal as JaxprLiteral
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..core.levels import Levels, Sizes, check_disjoint, check_pair
from ..core.problem import AbstractProblem, is_randomized
from ..core.proximal import Proximal, check_proximal
from ..onelevel.problem import check_scalar, check_set, check_start
from ..privacy.budget import People
from ..privacy.per_example.clipping import one_record
from ..privacy.queries import LEVELS
from ..privacy.records.rows import shapes_of
from ..sets import AbstractSet, Euclidean
from .certificates.constants import AbstractCertificate, Constants

Scalar = Float[Array, ""]
Loss = Callable[[PyTree, PyTree, PyTree], Scalar]
PublicTerm = Callable[[PyTree, PyTree], ArrayLike]


def _role_names(value: bool | Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, bool):
        return LEVELS if value else ()
    _checks.instance("BilevelProblem", (bool, str, tuple, list), x_in_records=value)
    chosen = (value,) if isinstance(value, str) else tuple(value)
    for name in chosen:
        _checks.one_of("BilevelProblem", "x_in_records", name, (*LEVELS, True, False))
    return tuple(role for role in LEVELS if role in chosen)


class BilevelProblem(AbstractProblem):
    r"""Minimize $F(x) = f(x, y^*(x))$ with $y^*(x) = \arg\min_y g(x, y)$.

    $$
    f(x, y) = \frac{1}{n_f} \sum_i f(x, y; z_i) + r_f(x, y), \qquad
    g(x, y) = \frac{1}{n_g} \sum_i g(x, y; z'_i) + r_g(x, y).
    $$

    Args:
        upper: $f(x, y, z)$: one record's upper-level loss, a scalar. Static.
        lower: $g(x, y, z)$: one record's lower-level loss, a scalar; with the public
            term strongly convex in $y$. Static.
        upper_public: $r_f(x, y)$, a scalar without data. Static.
        lower_public: $r_g(x, y)$, a scalar without data, such as a penalty: a function,
            or a term of `proximal`. Static.
        x_set: The feasible set of $x$.
        y_set: The feasible set of $y$.
        x_in_records: Which per-record losses read $x$: `True` (both), `False`
            (neither), or a level's name, as in `("lower",)`. If no record's loss
            reads $x$ the outer gradient is public and its release costs no budget. A
            claim that a level does not read $x$ is verified by tracing before anything
            runs; `traced` fills it in. Static.
        constants: Declared bounds: `Constants` to choose parameters by, or a
            certificate such as `SecondOrderConstants` for a solver whose guarantee
            rests on them. Static.

    Privacy:
        `upper` and `lower` see one record at a time and are clipped. The public terms
        must hold no private data, not even a statistic of it.
    """

    terms: ClassVar[tuple[str, ...]] = (*LEVELS, "upper_public", "lower_public")
    record_functions: ClassVar[tuple[str, ...]] = LEVELS

    upper: Loss = eqx.field(static=True)
    lower: Loss = eqx.field(static=True)
    upper_public: PublicTerm | None = eqx.field(static=True, default=None)
    lower_public: PublicTerm | None = eqx.field(static=True, default=None)
    x_set: AbstractSet = Euclidean()
    y_set: AbstractSet = Euclidean()
    x_in_records: bool | tuple[str, ...] = eqx.field(
        static=True, default=LEVELS, converter=_role_names
    )
    constants: Constants | AbstractCertificate | None = eqx.field(
        static=True, default=None
    )

    def __check_init__(self):
        _checks.check_fields(self)
        kinds = (Constants, AbstractCertificate, type(None))
        _checks.instance("BilevelProblem", kinds, constants=self.constants)
        if is_randomized(self.upper) or is_randomized(self.lower):
            raise ValueError(
                "BilevelProblem: losses of two levels take no key. Give Randomized to "
                "FiniteSum, or losses without randomness."
            )
        if isinstance(self.upper_public, Proximal):
            raise ValueError("BilevelProblem: only lower_public may be proximal.")
        if isinstance(self.lower_public, Proximal):
            check_proximal("BilevelProblem", self.lower_public, self.y_set)

    @override
    def with_functions(self, functions, unit):
        constants = self.constants
        if not isinstance(constants, AbstractCertificate):
            return dataclasses.replace(self, unit=unit, **functions)
        constants.check(self)  # those of other functions do not become these
        bare = dataclasses.replace(self, constants=None, unit=unit, **functions)
        return dataclasses.replace(bare, constants=constants.on_records_of(bare))

    def traced(self, w0: PyTree, data: Levels) -> "BilevelProblem":
        """Check the arguments; return a copy with `x_in_records` found by tracing.

        Raises:
            TypeError: As in `check`.
            ValueError: As in `check`, but for the claim.
        """
        return dataclasses.replace(self, x_in_records=self._checked(w0, data))

    def check(self, w0: PyTree, data: Levels) -> None:
        """Raise unless shapes fit, losses are scalars, and reads of x are declared.

        Raises:
            TypeError: `data` is not `Levels`.
            ValueError: `w0` is not a pair of finite numbers, shapes do not fit, a loss
                is not a scalar, or a level that is declared not to read `x` does.
        """
        readers = self._checked(w0, data)
        if undeclared := {role for role in readers if not self.reads_x(role)}:
            raise ValueError(
                f"BilevelProblem: losses of {sorted(undeclared)} read x. Add them to "
                "x_in_records, or move that part to a public term."
            )

    def _checked(self, w0: PyTree, data: Levels) -> tuple[str, ...]:
        """Check shapes and losses; return a tuple of the levels that read x."""
        self.check_people(data, _natural_people(data))
        records = {}
        for role in LEVELS:  # an empty level is fine: its number may be private
            level = getattr(data, role)
            _checks.leading_axis(f"data.{role}", shapes_of(level))
            records[role] = one_record(level)
        check_pair("BilevelProblem", w0)
        check_start(w0)
        check_set("x_set", self.x_set, w0[0])
        check_set("y_set", self.y_set, w0[1])
        for role, record in records.items():
            check_scalar(role, getattr(self, role), *w0, record)
        for name in ("upper_public", "lower_public"):
            term = getattr(self, name)
            if term is not None:
                check_scalar(name, term, *w0, of="the public term")
        losses = [(role, getattr(self, role)) for role in LEVELS]
        return tuple(k for k, loss in losses if reads_first(loss, *w0, records[k]))

    def sizes_of(self, data: Levels, people: People | str | None = None) -> Sizes:
        """Return `Sizes`: records per level, and `people`, by default from the data.

        Raises:
            TypeError: `data` is not `Levels`.
            ValueError: Leading axes differ within a level, or `people` contradicts
                the data.
        """
        natural = _natural_people(data)
        self.check_people(data, natural)
        sizes = Sizes(
            _checks.leading_axis("data.upper", shapes_of(data.upper)),
            _checks.leading_axis("data.lower", shapes_of(data.lower)),
            natural if people is None else people,
        )
        self.check_people(data, sizes.people)
        return sizes

    @override
    def check_sizes(self, owner: str, sizes: object) -> None:
        _checks.instance(owner, Sizes, sizes=sizes)

    def check_people(self, data: Levels, people: People) -> None:
        """Refuse `people` that contradict how the two levels share records.

        Raises:
            TypeError: `data` is not `Levels`.
            ValueError: Levels are shared and people are not, or the reverse; or one
                array is in both levels and people are disjoint.
        """
        _checks.instance("BilevelProblem", Levels, data=data)
        if (people is People.SHARED) != data.is_shared:
            raise ValueError(
                f"people={people.value!r} contradicts the data: use "
                "Levels.shared(records) exactly when every record enters both levels."
            )
        if people is People.DISJOINT:
            check_disjoint(data)

    def reads_x(self, role: str) -> bool:
        """Return whether the losses of level `role` are declared to read x."""
        return role in _role_names(self.x_in_records)


def _natural_people(data: object) -> People:
    shared = isinstance(data, Levels) and data.is_shared
    return People.SHARED if shared else People.OVERLAPPING


def reads_first(fun: Callable, first: PyTree, *rest: PyTree) -> bool:
    """Return whether `fun` may depend on its first argument, by its jaxpr."""
    jaxpr = jax.make_jaxpr(fun)(first, *rest).jaxpr  # on shapes alone
    reached = set(jaxpr.invars[: len(jax.tree.leaves(first))])
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if not isinstance(v, JaxprLiteral)]
        if reached.intersection(operands):
            reached.update(equation.outvars)  # also where x cancels: the safe side
    outputs = [v for v in jaxpr.outvars if not isinstance(v, JaxprLiteral)]
    return bool(reached.intersection(outputs))
