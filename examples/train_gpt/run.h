#pragma once

#include <memory>

#include <fsdp/fsdp.h>

#include "options.h"

/// The formula run: prints one JSON line on rank 0.
void run_formula(const Options& options, const std::shared_ptr<fsdp::World>& world);

/// Trains on text, reports, and samples.
void run_training(const Options& options, const std::shared_ptr<fsdp::World>& world);

/// The mean over all ranks.
double mean_over_ranks(const fsdp::DeviceMesh& mesh, double value);
