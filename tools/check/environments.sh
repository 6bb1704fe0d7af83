# What needs verifiers and reasoning-gym, and the tasks of the example environments. 200 MB to download.
tools/environments-venv.sh .springtide/environments-venv
(cd python/tests && "$environments" -m pytest -p no:cacheprovider --quiet against_verifiers.py against_openai.py)
(cd examples/environments && "$environments" -m unittest tables.test_tasks)
