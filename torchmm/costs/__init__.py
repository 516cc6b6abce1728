"""FLOPs, operators, parameters and bytes of modules, from sizes alone."""
