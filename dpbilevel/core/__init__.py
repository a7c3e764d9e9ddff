"""What a method is: problems, solvers, their loop, plans and what is kept on disk."""
