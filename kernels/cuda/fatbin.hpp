// SPDX-License-Identifier: Apache-2.0
//
// The kernels of kernels.cu, compiled for all targets and embedded at build time by fatbin.cpp.in.
#pragma once

extern "C" __attribute__((visibility("hidden"))) const unsigned char fkv_fatbin[];
