// SPDX-License-Identifier: Apache-2.0
//
// The fake driver's functions about streams and events.
#pragma once

#include <cuda.h>

#include "api_context.hpp"
#include "state.hpp"
#include "streams.hpp"

namespace fake {

inline CUresult stream_create(CUstream* handle, unsigned int flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (flags != CU_STREAM_NON_BLOCKING || priority > kLowestPriority ||
      priority < kHighestPriority) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto stream = std::make_unique<Stream>(priority);
  *handle = reinterpret_cast<CUstream>(stream.get());
  state.streams[*handle] = std::move(stream);
  return CUDA_SUCCESS;
}

inline CUresult stream_destroy(CUstream handle) {
  std::unique_ptr<Stream> stream;  // its thread needs the lock to end
  const std::lock_guard lock(mutex);
  const auto found = state.streams.find(handle);
  if (found != state.streams.end()) {
    stream = std::move(found->second);
    state.streams.erase(found);
  }
  return enter("cuStreamDestroy");
}

inline CUresult stream_synchronize(CUstream handle) {
  std::unique_lock lock(mutex);
  if (const CUresult result = enter("cuStreamSynchronize"); result != CUDA_SUCCESS) return result;
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  changed.wait(lock, [&] { return stream->idle() || sticky; });
  return sticky;
}

inline CUresult stream_wait_event(CUstream handle, CUevent waited, unsigned int flags) {
  pause_point("cuStreamWaitEvent");
  ENTER("cuStreamWaitEvent");
  if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  Stream* stream = find_stream(handle);
  const std::shared_ptr<Event> event = find_event(waited);
  if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->wait_for(event);
  return CUDA_SUCCESS;
}

inline CUresult stream_is_capturing(CUstream handle, CUstreamCaptureStatus* status) {
  ENTER("cuStreamIsCapturing");
  if (find_stream(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (handle == CU_STREAM_LEGACY && !state.captured.empty()) {
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  *status = state.captured.contains(handle) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                            : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// Without its fence the word may be seen before the bytes of earlier copies: the fake writes it first.
inline CUresult stream_write_value(CUstream handle, CUdeviceptr address, cuuint32_t value,
                            unsigned int flags) {
  ENTER("cuStreamWriteValue32");
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::uint64_t word = address;
  if (!resolve(word, 4) || overlapping(word, 4) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto write = [word, value] {
    __atomic_store_n(reinterpret_cast<std::uint32_t*>(word), value, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
  };
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return write();
  stream->enqueue(write);
  return CUDA_SUCCESS;
}

inline CUresult event_create(CUevent* handle, unsigned int flags) {
  ENTER("cuEventCreate");
  auto event = std::make_shared<Event>();
  event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *handle = reinterpret_cast<CUevent>(event.get());
  state.events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

inline CUresult event_destroy(CUevent handle) {
  const std::lock_guard lock(mutex);
  state.events.erase(handle);
  return enter("cuEventDestroy");
}

inline CUresult event_record(CUevent handle, CUstream on) {
  ENTER("cuEventRecord");
  Stream* stream = find_stream(on);
  const std::shared_ptr<Event> event = find_event(handle);
  if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->record(event);
  return CUDA_SUCCESS;
}

inline CUresult event_query(CUevent handle) {
  ENTER("cuEventQuery");
  const std::shared_ptr<Event> event = find_event(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return event->reached >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

inline CUresult event_elapsed_time(float* milliseconds, CUevent from, CUevent to) {
  ENTER("cuEventElapsedTime");
  const std::shared_ptr<Event> begin = find_event(from);
  const std::shared_ptr<Event> end = find_event(to);
  if (begin == nullptr || end == nullptr || !begin->timing || !end->timing) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (begin->reached < begin->recorded || end->reached < end->recorded) {
    return CUDA_ERROR_NOT_READY;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return CUDA_SUCCESS;
}

}  // namespace fake
