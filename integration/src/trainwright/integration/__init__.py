"""3D-parallel training of language models, composed from the trainwright libraries."""
