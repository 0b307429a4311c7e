# Thin: everything is in scripts/, CMakePresets.json and CMakeLists.txt.
PRESET ?= release
CMAKE := .venv/bin/cmake
export CCACHE_DIR ?= $(CURDIR)/.cache/ccache
export CCACHE_SLOPPINESS ?= pch_defines,time_macros

.PHONY: setup build test train format check-format clean

setup:
	scripts/setup.sh

build: setup
	$(CMAKE) --preset $(PRESET)
	$(CMAKE) --build --preset $(PRESET)

test: build
	.venv/bin/ctest --preset $(PRESET)

# Two ranks train a byte-level GPT, sharded (ZeRO-3), for about two minutes.
train: build
	scripts/launch.sh 2 build/$(PRESET)/examples/train_gpt/train_gpt --strategy zero3 $(ARGS)

format:
	scripts/setup.sh --with-format
	git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format -i

check-format:
	scripts/setup.sh --with-format
	git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format --dry-run -Werror

clean:
	rm -rf build
