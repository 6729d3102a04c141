"""A run's numbers in the files that others' tools read: CSV, TensorBoard, Weights & Biases, MLflow."""
