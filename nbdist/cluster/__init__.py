"""The workers that one notebook drives: starting them, running cells on them, ending them."""
