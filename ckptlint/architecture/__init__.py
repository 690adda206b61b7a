"""What a declared configuration says every tensor of the model must be: names, shapes, and the fields that fix them."""
