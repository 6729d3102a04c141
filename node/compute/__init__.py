"""The only place that imports torch: the model, the optimizer, the device."""
