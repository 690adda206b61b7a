"""The tensors of a checkpoint held against those that the configuration beside them implies."""
