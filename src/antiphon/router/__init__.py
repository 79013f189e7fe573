"""From a generation to a worker's answer: links to workers, the choice between them."""
