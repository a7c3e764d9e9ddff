"""Per-example gradients in factored form: norms, clipping, sums, micro-batches."""
