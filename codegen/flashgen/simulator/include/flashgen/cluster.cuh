// Host bodies for the functions of templates/include/flashgen/cluster.cuh, which says what each one is.
//
// A last argument that no kernel gives says where in the kernel's source the call stands: errors and counts name it.
#pragma once

#include "flashgen/ptx.cuh"
#include "simulator/async.hpp"

inline void mbarrier_init(shared_address barrier, int arrivals,
                          flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_init(barrier, arrivals, where);
}

inline void fence_mbarrier_init(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::fence_mbarrier_init(where);
}

inline void mbarrier_arrive(shared_address barrier,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_arrive(barrier, where);
}

inline void mbarrier_arrive_expect_tx(shared_address barrier, int bytes,
                                      flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_expect_tx(barrier, bytes, where);
    flashgen::simulator::mbarrier_arrive(barrier, where);
}

inline void mbarrier_wait(shared_address barrier, int parity,
                          flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_wait(barrier, parity, false, where);
}

inline void mbarrier_wait_cluster(shared_address barrier, int parity,
                                  flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_wait(barrier, parity, true, where);
}

inline shared_address map_shared(shared_address address, int rank,
                                 flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    return flashgen::simulator::map_shared(address, rank, where);
}

inline void mbarrier_arrive_cluster(shared_address barrier,
                                    flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::mbarrier_arrive_cluster(barrier, where);
}

inline void bulk_send(shared_address destination, shared_address source, shared_address barrier, int bytes,
                      flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::bulk_send(destination, source, barrier, bytes, where);
}

inline void store_async_64(shared_address destination, float a, float b, shared_address barrier,
                           flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::check_register(a, where);
    flashgen::simulator::check_register(b, where);
    const float values[2] = {a, b};
    flashgen::simulator::store_async(destination, values, 8, barrier, where);
}

inline void store_async_128(shared_address destination, const float (&values)[4], shared_address barrier,
                            flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    for (const float value : values) flashgen::simulator::check_register(value, where);
    flashgen::simulator::store_async(destination, values, 16, barrier, where);
}

inline void cluster_arrive_relaxed(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::cluster_arrive_relaxed(where);
}

inline void cluster_wait(flashgen::simulator::Location where = flashgen::simulator::Location::current()) {
    flashgen::simulator::cluster_wait(where);
}
