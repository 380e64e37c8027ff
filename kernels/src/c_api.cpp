// SPDX-License-Identifier: Apache-2.0
//
// The C ABI over Mover: exceptions become error codes and messages here, and nowhere else.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "c_api.hpp"

#include "copy.hpp"
#include "cpu_mover.hpp"
#include "cpu_tuning.hpp"
#include "flexkv/mover.h"
#include "layout.hpp"
#include "mover.hpp"

namespace flexkv {

void write_message(char* err, std::size_t err_len, std::string_view message) noexcept {
  if (err == nullptr || err_len == 0) {
    return;
  }
  const std::size_t length = std::min(message.size(), err_len - 1);
  std::memcpy(err, message.data(), length);
  err[length] = '\0';
}

}  // namespace flexkv

using flexkv::write_message;

namespace {

flexkv::Direction checked_direction(int direction) {
  switch (direction) {
    case FKV_LOAD:
      return flexkv::Direction::load;
    case FKV_STORE:
      return flexkv::Direction::store;
    default:
      throw flexkv::InvalidArgument("direction " + std::to_string(direction) +
                                    " is neither 0 (load) nor 1 (store)");
  }
}

}  // namespace

uint32_t fkv_abi_version(void) { return FKV_ABI_VERSION; }

const char* fkv_cpu_kernels(void) { return flexkv::copy_kernel_names(); }

fkv_mover* fkv_cpu_mover_create(const fkv_layout* layout, const fkv_cpu_options* options, char* err,
                                size_t err_len) {
  try {
    if (layout == nullptr || options == nullptr) {
      throw flexkv::InvalidArgument("layout or options is a null pointer");
    }
    auto mover =
        std::make_unique<flexkv::CpuMover>(flexkv::Layout(*layout), flexkv::tune(*options));
    mover->start();
    return new fkv_mover{std::move(mover)};
  } catch (const flexkv::InvalidArgument& error) {
    write_message(err, err_len, error.what());
  } catch (const std::bad_alloc&) {
    write_message(err, err_len, "no memory for the mover");
  } catch (const std::system_error& error) {
    write_message(err, err_len, std::string("a copying thread cannot be started: ") + error.what());
  }
  return nullptr;
}

uint64_t fkv_mover_block_bytes(const fkv_mover* mover) { return mover->mover->block_bytes(); }

int64_t fkv_mover_submit(fkv_mover* mover, int direction, const uint64_t* blocks,
                         const uint64_t* offsets, uint64_t n, uint32_t first_plane,
                         uint32_t n_planes, uint64_t after, int64_t mark, uint32_t* flag, char* err,
                         size_t err_len) {
  try {
    return mover->mover->submit({checked_direction(direction), blocks, offsets, n, first_plane,
                                 n_planes, after, mark, flag});
  } catch (const flexkv::InvalidArgument& error) {
    write_message(err, err_len, error.what());
    return FKV_EINVAL;
  } catch (const flexkv::Closed& error) {
    write_message(err, err_len, error.what());
    return FKV_ECLOSED;
  } catch (const std::bad_alloc&) {
    write_message(err, err_len, "no memory for the transfer");
    return FKV_ENOMEM;
  }
}

int64_t fkv_mover_mark(fkv_mover* mover, uint64_t stream, char* err, size_t err_len) {
  try {
    return mover->mover->mark(stream);
  } catch (const flexkv::InvalidArgument& error) {
    write_message(err, err_len, error.what());
    return FKV_EINVAL;
  } catch (const flexkv::Closed& error) {
    write_message(err, err_len, error.what());
    return FKV_ECLOSED;
  } catch (const std::bad_alloc&) {
    write_message(err, err_len, "no memory for the mark");
    return FKV_ENOMEM;
  }
}

int fkv_mover_poll(fkv_mover* mover, int64_t ticket) { return fkv_mover_wait(mover, ticket, 0); }

int fkv_mover_wait(fkv_mover* mover, int64_t ticket, int64_t timeout_us) {
  try {
    return static_cast<int>(mover->mover->wait(ticket, timeout_us));
  } catch (const flexkv::InvalidArgument&) {
    return FKV_EINVAL;
  } catch (const flexkv::Closed&) {
    return FKV_ECLOSED;
  } catch (const std::bad_alloc&) {
    return FKV_ENOMEM;
  }
}

int64_t fkv_mover_copy_ns(fkv_mover* mover, int64_t ticket) {
  try {
    return mover->mover->copy_ns(ticket);
  } catch (const flexkv::InvalidArgument&) {
    return FKV_EINVAL;
  } catch (const flexkv::Closed&) {
    return FKV_ECLOSED;
  }
}

int fkv_mover_hold(fkv_mover* mover, int64_t ticket, uint64_t stream, int64_t timeout_us, char* err,
                   size_t err_len) {
  try {
    const std::optional<flexkv::Status> status = mover->mover->hold(ticket, stream, timeout_us);
    return status.has_value() ? static_cast<int>(*status) : FKV_HELD;
  } catch (const flexkv::InvalidArgument& error) {
    write_message(err, err_len, error.what());
    return FKV_EINVAL;
  } catch (const flexkv::Closed& error) {
    write_message(err, err_len, error.what());
    return FKV_ECLOSED;
  } catch (const std::bad_alloc&) {
    write_message(err, err_len, "no memory to hold the stream");
    return FKV_ENOMEM;
  }
}

void fkv_mover_path_bytes(const fkv_mover* mover, uint64_t out[5]) {
  std::ranges::copy(mover->mover->path_bytes(), out);
}

int fkv_mover_error(fkv_mover* mover, char* err, size_t err_len) {
  try {
    const std::string error = mover->mover->error();
    write_message(err, err_len, error);
    return error.empty() ? 0 : 1;
  } catch (const flexkv::Closed&) {
    return FKV_ECLOSED;
  } catch (const std::bad_alloc&) {
    return FKV_ENOMEM;
  }
}

void fkv_mover_close(fkv_mover* mover) { mover->mover->close(); }

void fkv_mover_destroy(fkv_mover* mover) {
  // In a forked child the threads to join do not exist and the lock may be held for ever.
  if (mover != nullptr && !mover->mover->orphaned()) {
    delete mover;
  }
}
