// SPDX-License-Identifier: Apache-2.0
//
// A profiler that prints the ranges of all domains: thread, depth, domain and name of each.
#include <nvtx3/nvToolsExt.h>

#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace {

thread_local int depth = 0;

nvtxDomainHandle_t create(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(strdup(name));
}

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  char line[256];
  const int length = snprintf(line, sizeof(line), "range %d %d %s: %s\n", gettid(), depth,
                              reinterpret_cast<const char*>(domain), event->message.ascii);
  depth += 1;
  return write(STDOUT_FILENO, line, length) == length ? depth : -1;
}

int pop(nvtxDomainHandle_t) { return --depth; }

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t table_of) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(table_of(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
