//! The tensor part of a header: names, shapes, types and places, checked as they stream past.

use super::{GgufError, Header, TENSOR_NAME_BYTES_MAX, TensorProblem, Totals, limit, source::Source, types};
use std::{
    hash::{DefaultHasher, Hasher},
    io::Read,
};

const DIMENSIONS_MAX: u32 = 4;
const PART: &str = "tensor list";

/// Reads all tensor descriptions and fills the header's totals.
pub(super) fn read<R: Read>(source: &mut Source<R>, header: &mut Header, alignment: u64) -> Result<(), GgufError> {
    let mut names = Vec::with_capacity(header.tensor_count as usize);
    let mut expected_offset: u64 = 0;
    let mut end: u64 = 0;
    let mut last_name = String::new();
    for _ in 0..header.tensor_count {
        let tensor = read_one(source)?;
        let wrong = |problem| GgufError::Tensor { name: tensor.name.clone(), problem };
        if !tensor.offset_bytes.is_multiple_of(alignment) {
            return Err(wrong(TensorProblem::Misaligned));
        }
        // llama.cpp takes tensors in order and without holes; anything else is corruption.
        if tensor.offset_bytes < expected_offset {
            return Err(wrong(TensorProblem::Overlap));
        }
        if tensor.offset_bytes >= header.file_bytes {
            return Err(wrong(TensorProblem::OutsideFile));
        }
        if tensor.offset_bytes > expected_offset {
            return Err(wrong(TensorProblem::Hole));
        }
        end = expected_offset.checked_add(tensor.bytes).ok_or_else(|| wrong(TensorProblem::Overflow))?;
        expected_offset = end.checked_next_multiple_of(alignment).ok_or_else(|| wrong(TensorProblem::Overflow))?;
        header.tensor_bytes = header.tensor_bytes.saturating_add(tensor.bytes);
        header.totals.add(&tensor.totals());
        if tensor.repacked {
            header.repacked_bytes = header.repacked_bytes.saturating_add(tensor.bytes);
        }
        names.push(hash(&tensor.name));
        last_name = tensor.name;
    }
    header.data_offset_bytes = source.position_bytes().next_multiple_of(alignment);
    // The bytes after the last tensor are padding, which some writers leave out.
    let file_end = header.data_offset_bytes.checked_add(end);
    if header.tensor_count > 0 && file_end.is_none_or(|end| end > header.file_bytes) {
        return Err(GgufError::Tensor { name: last_name, problem: TensorProblem::OutsideFile });
    }
    names.sort_unstable();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(GgufError::Tensor { name: "one name".into(), problem: TensorProblem::Duplicate });
    }
    Ok(())
}

struct Tensor {
    name: String,
    offset_bytes: u64,
    elements: u64,
    bytes: u64,
    repacked: bool,
}

impl Tensor {
    /// Names as llama.cpp gives them (`llama-arch.cpp`).
    fn totals(&self) -> Totals {
        let of = |counts: bool| if counts { (self.elements, self.bytes) } else { (0, 0) };
        let (expert_elements, expert_bytes) = of(self.name.contains("_exps."));
        let (embedding_elements, embedding_bytes) = of(self.name == "token_embd.weight");
        let has_output = self.name == "output.weight";
        let elements = self.elements;
        Totals { elements, expert_elements, expert_bytes, embedding_elements, embedding_bytes, has_output }
    }
}

fn read_one<R: Read>(source: &mut Source<R>) -> Result<Tensor, GgufError> {
    let name_bytes = source.u64(PART)?;
    source.require(name_bytes, PART)?;
    limit("bytes in one tensor name", name_bytes, TENSOR_NAME_BYTES_MAX)?;
    let mut raw = vec![0; name_bytes as usize];
    source.read(&mut raw, PART)?;
    let name = String::from_utf8_lossy(&raw).into_owned();
    let wrong = |problem| GgufError::Tensor { name: name.clone(), problem };

    let dimensions = source.u32(PART)?;
    if dimensions == 0 || dimensions > DIMENSIONS_MAX {
        return Err(wrong(TensorProblem::Shape));
    }
    let mut shape = [1u64; DIMENSIONS_MAX as usize];
    for length in shape.iter_mut().take(dimensions as usize) {
        *length = source.u64(PART)?;
        if *length == 0 || *length > i64::MAX as u64 {
            return Err(wrong(TensorProblem::Shape));
        }
    }
    let elements = shape
        .iter()
        .try_fold(1u64, |product, length| product.checked_mul(*length).filter(|total| *total <= i64::MAX as u64))
        .ok_or_else(|| wrong(TensorProblem::Overflow))?;
    let element_type = source.u32(PART)?;
    let (block_elements, block_bytes) =
        types::block_of(element_type).ok_or_else(|| wrong(TensorProblem::UnknownType(element_type)))?;
    if !shape[0].is_multiple_of(block_elements) {
        return Err(wrong(TensorProblem::Blocks));
    }
    let bytes = (elements / block_elements)
        .checked_mul(block_bytes)
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| wrong(TensorProblem::Overflow))?;
    let offset_bytes = source.u64(PART)?;
    // Embeddings are looked up row by row and stay as they are; matrices of whole groups of eight rows are copied.
    let is_matrix = dimensions >= 2 && !name.starts_with("token_embd") && shape[1].is_multiple_of(8);
    Ok(Tensor { repacked: is_matrix && types::is_repacked(element_type), name, offset_bytes, elements, bytes })
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(name.as_bytes());
    hasher.finish()
}
