# SPDX-License-Identifier: Apache-2.0
#
# Compiles the CUDA mover. Nothing of CUDA is linked: the library loads on machines without a GPU.
#
#   -DFLEXKV_CUDA=ON    stop if there is no nvcc (what pip's builds say where there are GPUs)
#                 AUTO  with CUDA if nvcc is there (the default of a plain CMake)
#                 OFF   without

set(FLEXKV_CUDA "AUTO" CACHE STRING "Build the CUDA mover: AUTO, ON or OFF")
set(FKV_CUDA_MIN_VERSION 12.8)  # cuMemcpyBatchAsync in cuda.h, sm_100
set(FKV_CUDA_TARGETS 80 90 100 120)

# Sets FKV_NVCC and FKV_CUDA_INCLUDE, or `problem` to what is missing.
function(fkv_find_cuda problem)
  find_program(FKV_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    PATHS /usr/local/cuda /opt/cuda DOC "CUDA's compiler")
  if(NOT FKV_NVCC)
    set(${problem} "nvcc is not on the PATH, nor in CUDA_HOME or /usr/local/cuda" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${FKV_NVCC}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${problem} "${FKV_NVCC} --version names no release" PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_MATCH_1 VERSION_LESS FKV_CUDA_MIN_VERSION)
    set(${problem} "${FKV_NVCC} is of CUDA ${CMAKE_MATCH_1}, older than ${FKV_CUDA_MIN_VERSION}"
      PARENT_SCOPE)
    return()
  endif()
  # nvcc may be a script or a link: what it would do tells where its toolkit is.
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nothing.cu" "__global__ void nothing() {}\n")
  execute_process(COMMAND "${FKV_NVCC}" --dryrun -c "${CMAKE_CURRENT_BINARY_DIR}/nothing.cu"
    WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" ERROR_VARIABLE text OUTPUT_QUIET)
  string(REGEX MATCH "TOP=([^\n]*)" _ "${text}")
  set(top "${CMAKE_MATCH_1}")
  string(REGEX MATCH "_TARGET_DIR_=(targets[^\n]*)" _ "${text}")
  find_path(FKV_CUDA_INCLUDE cudaTypedefs.h
    HINTS "${top}/include" "${top}/${CMAKE_MATCH_1}/include" DOC "Folder of cuda.h")
  if(NOT FKV_CUDA_INCLUDE)
    set(${problem} "the headers cuda.h and cudaTypedefs.h of ${FKV_NVCC} are not found" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${FKV_NVCC}" ${FKV_NVCC_FLAGS} -fatbin -o nothing.fatbin nothing.cu
    WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}" RESULT_VARIABLE failed ERROR_VARIABLE text
    OUTPUT_QUIET)
  if(failed)
    set(${problem} "${FKV_NVCC} cannot compile: ${text}" PARENT_SCOPE)
  endif()
endfunction()

# Machine code for the targets that this nvcc knows, which runs on later devices of the same major
# version, too. PTX of the last for devices after it, and of sm_90 for others between: it is the first
# with bulk copies.
function(fkv_cuda_targets flags)
  execute_process(COMMAND "${FKV_NVCC}" --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  set(result "")
  set(used "")
  foreach(target IN LISTS FKV_CUDA_TARGETS)
    if(known MATCHES "sm_${target}[^0-9a-z]")
      list(APPEND result "-gencode=arch=compute_${target},code=sm_${target}")
      list(APPEND used ${target})
    endif()
  endforeach()
  list(GET used -1 last)
  set(virtual ${last})
  if(90 IN_LIST used)
    list(PREPEND virtual 90)
  endif()
  foreach(target IN LISTS virtual)
    list(APPEND result "-gencode=arch=compute_${target},code=compute_${target}")
  endforeach()
  list(REMOVE_DUPLICATES result)
  message(STATUS "CUDA mover: ${FKV_NVCC}, targets ${used}, PTX ${virtual}")
  set(${flags} "${result}" PARENT_SCOPE)
endfunction()

# Only device code is taken from nvcc, for which any host compiler will do.
set(FKV_NVCC_FLAGS -std=c++17 -O3 -ccbin "${CMAKE_CXX_COMPILER}" -allow-unsupported-compiler)

set(FKV_CUDA_PROBLEM "")
if(FLEXKV_CUDA)
  fkv_find_cuda(FKV_CUDA_PROBLEM)
  if(FKV_CUDA_PROBLEM AND NOT FLEXKV_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "FLEXKV_CUDA is ${FLEXKV_CUDA}, but ${FKV_CUDA_PROBLEM}.")
  endif()
else()
  set(FKV_CUDA_PROBLEM "FLEXKV_CUDA is ${FLEXKV_CUDA}")
endif()

if(FKV_CUDA_PROBLEM)
  message(STATUS "Without the CUDA mover: ${FKV_CUDA_PROBLEM}")
  configure_file(src/no_cuda.cpp.in no_cuda.cpp @ONLY)
  target_sources(flexkv_kernels PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/no_cuda.cpp")
  target_include_directories(flexkv_kernels PRIVATE src)
  return()
endif()

fkv_cuda_targets(FKV_GENCODE)
set(FKV_FATBIN "${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin")
add_custom_command(OUTPUT "${FKV_FATBIN}"
  COMMAND "${FKV_NVCC}" ${FKV_NVCC_FLAGS} ${FKV_GENCODE} -fatbin
    "-I${CMAKE_CURRENT_SOURCE_DIR}/src" -o "${FKV_FATBIN}"
    "${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels.cu"
  DEPENDS cuda/kernels.cu cuda/bulk_copy.hpp cuda/bulk_ptx.cuh cuda/copy_tile.hpp cuda/kernel_names.hpp cuda/tiles.hpp
    src/geometry.hpp
  COMMENT "Compiling the CUDA kernels" VERBATIM)
configure_file(cuda/fatbin.cpp.in fatbin.cpp @ONLY)
set_source_files_properties("${CMAKE_CURRENT_BINARY_DIR}/fatbin.cpp" PROPERTIES
  OBJECT_DEPENDS "${FKV_FATBIN}")
target_sources(flexkv_kernels PRIVATE
  "${CMAKE_CURRENT_BINARY_DIR}/fatbin.cpp"
  cuda/cuda_api.cpp
  cuda/cuda_mover.cpp
  cuda/cuda_mover_thread.cpp
  cuda/cuda_tuning.cpp
  cuda/device.cpp
  cuda/device_memory.cpp
  cuda/device_side.cpp
  cuda/driver.cpp
  cuda/driver_batch.cpp
  cuda/driver_copies.cpp
  cuda/host_registration.cpp
  cuda/kernel_copies.cpp
  cuda/lane.cpp
  cuda/slot_runs.cpp
  cuda/staged_copies.cpp
  cuda/staged_tiles.cpp
  cuda/tile_table.cpp
  cuda/ways.cpp)
target_include_directories(flexkv_kernels PRIVATE src cuda)
target_include_directories(flexkv_kernels SYSTEM PRIVATE "${FKV_CUDA_INCLUDE}")
target_link_libraries(flexkv_kernels PRIVATE ${CMAKE_DL_LIBS})
