"""The parts of a method: problems, solvers, their loop, plans and solutions."""
