"""Values and facts that all of tritile stands on: problems, configs, devices, views of tensors, settings."""
