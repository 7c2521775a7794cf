"""From a problem to the custom call: the libraries, the primitives, lowering, splitting."""
