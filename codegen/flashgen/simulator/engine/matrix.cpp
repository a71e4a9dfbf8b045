// ldmatrix, stmatrix and mma.sync, by the fragment layouts of the PTX ISA.
#include <bit>
#include <cstring>

#include "block.hpp"
#include "collision.hpp"
#include "simulator/numbers.hpp"

namespace flashgen::simulator {
namespace {

constexpr int kRowBytes = 16;  // of an 8x8 matrix of 16-bit elements

struct LoadOperand {
    uint32_t row;
    bool transposed;
    uint32_t* fragment;
};

bool complete_load(Warp& warp, uint32_t, Location where) {
    Block& block = *warp.block;
    uint16_t matrices[4][8][8];
    WarpAccess access;
    access.lanes = ~0u;
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operand = *static_cast<LoadOperand*>(warp.operands[lane]);
        const Thread& thread = block.thread(warp.first_thread() + lane);
        const uint32_t offset = shared_offset(block, thread, operand.row, kRowBytes, "ldmatrix", where);
        fail_collision(block, thread, "ldmatrix",
                       block.shared().load(Party(block.order(), thread.index), offset, kRowBytes, Touch::load_matrices, where), where);
        std::memcpy(matrices[lane / 8][lane % 8], block.shared().bytes() + offset, kRowBytes);
        access.addresses[lane] = offset;
        access.sizes[lane] = kRowBytes;
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operand = *static_cast<LoadOperand*>(warp.operands[lane]);
        const int row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            const auto& matrix = matrices[i];
            const uint32_t low = operand.transposed ? matrix[column][row] : matrix[row][column];
            const uint32_t high = operand.transposed ? matrix[column + 1][row] : matrix[row][column + 1];
            operand.fragment[i] = low | high << 16;
        }
    }
    ++block.counters->ldmatrix;
    block.counters->shared_bytes_read += 32 * kRowBytes;
    block.traffic().add(block.traffic().site(where, SIM_LDMATRIX), SIM_LDMATRIX, 32 * kRowBytes,
                        shared_wavefronts(access));
    return true;
}

struct StoreOperand {
    uint32_t row;
    const uint32_t* matrices;
};

bool complete_store(Warp& warp, uint32_t, Location where) {
    Block& block = *warp.block;
    uint16_t matrices[4][8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operand = *static_cast<StoreOperand*>(warp.operands[lane]);
        const int row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            if (is_unset(operand.matrices[i])) {
                block.fail(block.thread(warp.first_thread() + lane), SIM_UNINITIALISED_REGISTER, where,
                           "stmatrix of a register that nothing has set");
            }
            matrices[i][row][column] = static_cast<uint16_t>(operand.matrices[i]);
            matrices[i][row][column + 1] = static_cast<uint16_t>(operand.matrices[i] >> 16);
        }
    }
    WarpAccess access;
    access.lanes = ~0u;
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operand = *static_cast<StoreOperand*>(warp.operands[lane]);
        const Thread& thread = block.thread(warp.first_thread() + lane);
        const uint32_t offset = shared_offset(block, thread, operand.row, kRowBytes, "stmatrix", where);
        fail_collision(block, thread, "stmatrix",
                       block.shared().store(Party(block.order(), thread.index), offset, kRowBytes, Touch::store, where), where);
        std::memcpy(block.shared().bytes() + offset, matrices[lane / 8][lane % 8], kRowBytes);
        access.addresses[lane] = offset;
        access.sizes[lane] = kRowBytes;
    }
    ++block.counters->stmatrix;
    block.counters->shared_bytes_written += 32 * kRowBytes;
    block.traffic().add(block.traffic().site(where, SIM_SHARED_STORE), SIM_SHARED_STORE, 32 * kRowBytes,
                        shared_wavefronts(access));
    return true;
}

struct MultiplyOperand {
    MatrixProduct kind;
    float* accumulator;
    const uint32_t* a;
    uint32_t b[2];
};

constexpr int kRows = 16;
constexpr int kColumns = 8;

void check_registers(Block& block, const Thread& thread, const MultiplyOperand& operand, Location where) {
    const char* which = nullptr;
    for (int i = 0; i < 4; ++i) {
        if (is_unset(operand.accumulator[i])) which = "accumulator";
        if (is_unset(operand.a[i])) which = "left operand";
    }
    if (is_unset(operand.b[0]) || is_unset(operand.b[1])) which = "right operand";
    if (which == nullptr) return;
    block.fail(thread, SIM_UNINITIALISED_REGISTER, where, format("mma with a register of its %s that nothing has set", which));
}

// accumulator (16 x 8) += a (16 x kDepth) . b (kDepth x 8). Products and their sum are exact up to the precision of
// double, and cut off towards zero to fp32 once.
template <int kDepth>
void multiply_add(float (&accumulator)[kRows][kColumns], const double (&a)[kRows][kDepth],
                  const double (&b)[kDepth][kColumns]) {
    for (int row = 0; row < kRows; ++row) {
        double sums[kColumns];
        for (int column = 0; column < kColumns; ++column) sums[column] = 0.0;
        for (int k = 0; k < kDepth; ++k) {
            for (int column = 0; column < kColumns; ++column) sums[column] += a[row][k] * b[k][column];
        }
        for (int column = 0; column < kColumns; ++column) {
            accumulator[row][column] = truncate_to_float(accumulator[row][column] + sums[column]);
        }
    }
}

template <float (*kConvert)(uint16_t)>
void multiply_16_bit(const MultiplyOperand* (&operands)[32], float (&accumulator)[kRows][kColumns]) {
    double a[kRows][16];
    double b[16][kColumns];
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int e = 0; e < 2; ++e) {
            auto half = [e](uint32_t word) { return kConvert(static_cast<uint16_t>(word >> 16 * e)); };
            a[group][pair + e] = half(operands[lane]->a[0]);
            a[group + 8][pair + e] = half(operands[lane]->a[1]);
            a[group][pair + 8 + e] = half(operands[lane]->a[2]);
            a[group + 8][pair + 8 + e] = half(operands[lane]->a[3]);
            b[pair + e][group] = half(operands[lane]->b[0]);
            b[pair + 8 + e][group] = half(operands[lane]->b[1]);
        }
    }
    multiply_add(accumulator, a, b);
}

void multiply_tf32(const MultiplyOperand* (&operands)[32], float (&accumulator)[kRows][kColumns]) {
    constexpr uint32_t kTf32Bits = 0xffffe000;
    double a[kRows][8];
    double b[8][kColumns];
    auto number = [](uint32_t word) { return std::bit_cast<float>(word & kTf32Bits); };
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane / 4, index = lane % 4;
        a[group][index] = number(operands[lane]->a[0]);
        a[group + 8][index] = number(operands[lane]->a[1]);
        a[group][index + 4] = number(operands[lane]->a[2]);
        a[group + 8][index + 4] = number(operands[lane]->a[3]);
        b[index][group] = number(operands[lane]->b[0]);
        b[index + 4][group] = number(operands[lane]->b[1]);
    }
    multiply_add(accumulator, a, b);
}

void multiply_e4m3(const MultiplyOperand* (&operands)[32], float (&accumulator)[kRows][kColumns]) {
    uint8_t a[kRows][kDepthE4m3];
    uint8_t b[kColumns][kDepthE4m3];
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane / 4, first = lane % 4 * 4;
        for (int i = 0; i < 4; ++i) std::memcpy(&a[group + i % 2 * 8][first + i / 2 * 16], &operands[lane]->a[i], 4);
        for (int i = 0; i < 2; ++i) std::memcpy(&b[group][first + 16 * i], &operands[lane]->b[i], 4);
    }
    for (int row = 0; row < kRows; ++row) {
        E4m3 left[kDepthE4m3];
        for (int k = 0; k < kDepthE4m3; ++k) left[k] = decode_e4m3(a[row][k]);
        for (int column = 0; column < kColumns; ++column) {
            accumulator[row][column] = add_products_e4m3(accumulator[row][column], a[row], left, b[column]);
        }
    }
}

bool complete_multiply(Warp& warp, uint32_t, Location where) {
    Block& block = *warp.block;
    const MultiplyOperand* operands[32];
    float accumulator[kRows][kColumns];
    for (int lane = 0; lane < 32; ++lane) {
        operands[lane] = static_cast<MultiplyOperand*>(warp.operands[lane]);
        check_registers(block, block.thread(warp.first_thread() + lane), *operands[lane], where);
        for (int e = 0; e < 4; ++e) {
            accumulator[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2] = operands[lane]->accumulator[e];
        }
    }
    switch (operands[0]->kind) {
        case MatrixProduct::m16n8k16_f16:
            ++block.counters->mma_m16n8k16_f16;
            multiply_16_bit<fp16_to_float>(operands, accumulator);
            break;
        case MatrixProduct::m16n8k16_bf16:
            ++block.counters->mma_m16n8k16_bf16;
            multiply_16_bit<bf16_to_float>(operands, accumulator);
            break;
        case MatrixProduct::m16n8k8_tf32:
            ++block.counters->mma_m16n8k8_tf32;
            multiply_tf32(operands, accumulator);
            break;
        case MatrixProduct::m16n8k32_e4m3:
            ++block.counters->mma_m16n8k32_e4m3;
            multiply_e4m3(operands, accumulator);
            break;
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int e = 0; e < 4; ++e) {
            operands[lane]->accumulator[e] = accumulator[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
        }
    }
    return true;
}

}  // namespace

void load_matrices(uint32_t (&fragment)[4], uint32_t row, bool transposed, Location where) {
    LoadOperand own = {row, transposed, fragment};
    running_thread().owner->meet(Operation::load_matrices, true, 0xffffffff, &own, complete_load, where);
}

void store_matrices(uint32_t row, const uint32_t (&matrices)[4], Location where) {
    StoreOperand own = {row, matrices};
    running_thread().owner->meet(Operation::store_matrices, true, 0xffffffff, &own, complete_store, where);
}

void multiply_matrices(MatrixProduct kind, float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       Location where) {
    MultiplyOperand own = {kind, accumulator, a, {b0, b1}};
    running_thread().owner->meet(Operation::multiply_matrices, true, 0xffffffff, &own, complete_multiply, where);
}

}  // namespace flashgen::simulator
