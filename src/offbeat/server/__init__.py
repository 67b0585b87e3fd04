"""The parameter server: dedicated ranks that hold the parameters, and what workers say to them."""
