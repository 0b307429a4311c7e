#pragma once

/// Fully sharded data parallel for LibTorch: everything a training program needs.
#include <fsdp/activation_checkpoint.h>
#include <fsdp/checkpoint.h>
#include <fsdp/collective_log.h>
#include <fsdp/compat.h>
#include <fsdp/context.h>
#include <fsdp/dbuffer.h>
#include <fsdp/distributed/communicator.h>
#include <fsdp/distributed/device_mesh.h>
#include <fsdp/distributed/world.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/hooks.h>
#include <fsdp/layout.h>
#include <fsdp/mixed_precision.h>
#include <fsdp/module.h>
#include <fsdp/optim.h>
#include <fsdp/outputs.h>
#include <fsdp/parameter_group.h>
#include <fsdp/placement.h>
#include <fsdp/schedule_policy.h>
