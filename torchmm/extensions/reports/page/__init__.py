"""Build the pages of one run (`index.html`) and of several runs."""
