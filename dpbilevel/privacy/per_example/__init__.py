"""Per-example gradients: factored forms, norms, clipping, sums, micro-batches."""
