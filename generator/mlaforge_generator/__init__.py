"""mlaforge generator: turns a YAML spec of one MLA attention configuration into CUDA source."""
