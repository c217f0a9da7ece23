"""Specs from and to the files of others: config.json, a plugin's JSON, a C header of constants, a CMake folder."""
