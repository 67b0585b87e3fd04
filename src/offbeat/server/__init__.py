"""Parameter server: dedicated ranks that hold and update the parameters, and their clients."""
