"""Pages of one run (`index.html`) and of several runs, built by `pages`."""
