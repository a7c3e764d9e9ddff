"""NON-PRIVATE, differentiable answers to the parts of a bilevel problem.

Nothing here clips, adds noise or spends budget: what it returns follows the records
exactly. For experiments without a guarantee, as the reference that private solvers are
compared with, and inside solvers that add the noise themselves.
"""
