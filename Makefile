# The verbs of this project; CI calls the same ones.
.PHONY: setup serve chat test check bench docs format
bin := .venv/bin

setup: ## make .venv with everything in it (first time: about 3 minutes, llama.cpp is compiled)
	@scripts/setup

serve: setup ## serve the built-in model on http://127.0.0.1:8000
	@$(bin)/antiphon serve $(ARGS)

chat: setup ## talk to it in the terminal
	@$(bin)/antiphon chat $(ARGS)

test: setup ## all tests (network-free, under 15 minutes on 2 cores)
	@$(bin)/python -m pytest $(ARGS)

check: setup ## style, types, layers, generated docs
	@$(bin)/ruff check src tests bench scripts
	@$(bin)/ruff format --check src tests bench scripts
	@$(bin)/mypy
	@$(bin)/lint-imports --no-cache
	@$(bin)/python -m scripts.docs --check

docs: setup ## write the generated docs
	@$(bin)/python -m scripts.docs

bench: setup ## one bench: make bench NAME=engine ARGS=--quick
	@$(bin)/python -m bench $(NAME) $(ARGS)

format: setup
	@$(bin)/ruff check --fix src tests bench scripts; $(bin)/ruff format src tests bench scripts
