"""What all ranks agree on: the words on the wire, the gate, the group."""
