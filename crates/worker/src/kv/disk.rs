//! The tier's blocks on disk: what the loop wants done there, and the answers as events.

use super::KvCommand;
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::mpsc::WeakUnboundedSender;
use warmset_core::kv::{
    BLOCK_TOKENS, BlockKey, BlockNumber, DiskPlace, Event, FoundBlock, HEADER_BYTES, KvIdentity, ReadFailure,
    TrustDomain,
};
use warmset_store::{
    StoreError,
    arena::Arena,
    segments::{BlockId, Location, Options, Recovery, Segments},
};

/// A read that takes longer is given up: whoever waited for it has long been computing.
const READ_DEADLINE: Duration = Duration::from_secs(30);
/// How often blocks are looked at that are older than they may become.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(60);

/// Where KV lies on disk.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The directory.
    pub directory: PathBuf,
    /// How it is kept.
    pub options: Options,
    /// How long a block is kept; none keeps it for as long as there is room.
    pub retention: Option<Duration>,
}

/// The disk, as the loop uses it. Nothing here blocks but [`Disk::open`]. What it tells the loop carries no sum of bytes:
/// that is the loop's to ask for.
pub(super) struct Disk {
    segments: Arc<Segments>,
    commands: WeakUnboundedSender<KvCommand>,
}

impl Disk {
    /// Opens the directory and begins to find what is there.
    pub(super) fn open(config: DiskConfig, commands: WeakUnboundedSender<KvCommand>) -> Result<Self, StoreError> {
        let (segments, recovery) = Segments::open(&config.directory, config.options)?;
        let segments = Arc::new(segments);
        let finding = commands.clone();
        tokio::task::spawn_blocking(move || {
            for found in recovery {
                match found {
                    Recovery::Found(blocks) => {
                        let blocks = blocks.iter().filter_map(found_block).collect();
                        tell(&finding, Event::Found { blocks, disk_bytes: 0 });
                    }
                    Recovery::Complete(recovered) => {
                        tracing::info!(blocks = recovered.blocks, "all KV on disk is known");
                    }
                }
            }
        });
        if let Some(retention) = config.retention {
            tokio::spawn(expire(Arc::downgrade(&segments), retention, commands.clone()));
        }
        Ok(Self { segments, commands })
    }

    /// Bytes that lie there, whoever wrote them.
    pub(super) fn used_bytes(&self) -> u64 {
        self.segments.figures().used_bytes
    }

    pub(super) fn write(&self, block: BlockNumber, arena: &Arc<Arena>, slot: u32) {
        let began = Instant::now();
        let Some(reader) = arena.reader(slot) else {
            return self.not_written(block, "slot");
        };
        let commands = self.commands.clone();
        let bytes: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(reader);
        let queued = self.segments.append(vec![bytes], move |results| {
            let outcome = match results.into_iter().next() {
                Some(Ok(Location { segment, page, pages })) => Ok(DiskPlace { segment, page, pages }),
                Some(Err(error)) => {
                    tracing::debug!(%error, "a block of KV is not on disk");
                    Err("write".to_owned())
                }
                None => Err("write".to_owned()),
            };
            let seconds = began.elapsed().as_secs_f64();
            tell(&commands, Event::Written { block, outcome, seconds, disk_bytes: 0 });
        });
        if queued.is_err() {
            self.not_written(block, "queue");
        }
    }

    fn not_written(&self, block: BlockNumber, reason: &str) {
        let outcome = Err(reason.to_owned());
        tell(&self.commands, Event::Written { block, outcome, seconds: 0.0, disk_bytes: 0 });
    }

    pub(super) fn read(
        &self,
        block: BlockNumber,
        (identity, domain, key): (KvIdentity, TrustDomain, BlockKey),
        place: DiskPlace,
        (arena, slot): (&Arc<Arena>, u32),
    ) {
        let began = Instant::now();
        let commands = self.commands.clone();
        let Some(writer) = arena.writer(slot) else {
            let failure = Some(ReadFailure { reason: "slot".to_owned(), slot_is_held: true });
            return tell(&commands, Event::ReadDone { block, seconds: 0.0, failure });
        };
        let location = Location { segment: place.segment, page: place.page, pages: place.pages };
        let wanted = BlockId { identity, domain, key };
        self.segments.read(location, wanted, writer, Instant::now() + READ_DEADLINE, move |result| {
            let failure = result.err().map(|failed| ReadFailure {
                reason: failed.error.reason().to_owned(),
                slot_is_held: failed.memory.is_none(),
            });
            let seconds = began.elapsed().as_secs_f64();
            tell(&commands, Event::ReadDone { block, seconds, failure });
        });
    }

    pub(super) fn retire(&self, place: DiskPlace) {
        self.segments.retire(&Location { segment: place.segment, page: place.page, pages: place.pages });
    }

    pub(super) fn purge(&self, domain: TrustDomain) {
        let segments = Arc::clone(&self.segments);
        tokio::task::spawn_blocking(move || match segments.purge(&domain) {
            Ok(purged) => tracing::info!(
                blocks = purged.dropped.blocks,
                complete = purged.is_complete,
                "a trust domain's KV was purged"
            ),
            Err(error) => tracing::error!(%error, "a trust domain's KV could not be purged"),
        });
    }
}

/// Blocks older than they may be are given up.
async fn expire(segments: std::sync::Weak<Segments>, retention: Duration, commands: WeakUnboundedSender<KvCommand>) {
    loop {
        tokio::time::sleep(EXPIRY_INTERVAL.min(retention)).await;
        let Some(segments) = segments.upgrade() else { return };
        let before = super::gather::unix_seconds().saturating_sub(retention.as_secs());
        let expired = tokio::task::spawn_blocking(move || segments.expire(before)).await.unwrap_or_default();
        let places: Vec<DiskPlace> =
            expired.into_iter().map(|Location { segment, page, pages }| DiskPlace { segment, page, pages }).collect();
        if !places.is_empty() {
            tell(&commands, Event::Expired { places });
        }
    }
}

fn found_block(found: &warmset_store::segments::Found) -> Option<FoundBlock> {
    let Location { segment, page, pages } = found.location;
    // Incomplete blocks belong to generations that were interrupted.
    (found.token_count == BLOCK_TOKENS).then_some(())?;
    Some(FoundBlock {
        identity: found.id.identity,
        domain: found.id.domain,
        key: found.id.key,
        parent: found.parent,
        depth: u32::try_from(found.first_token / u64::from(BLOCK_TOKENS)).ok()?,
        payload_bytes: found.location.bytes().saturating_sub(HEADER_BYTES as u64),
        place: DiskPlace { segment, page, pages },
    })
}

fn tell(commands: &WeakUnboundedSender<KvCommand>, event: Event) {
    // A tier that has ended needs no answers.
    if let Some(commands) = commands.upgrade() {
        let _ = commands.send(KvCommand::Disk(event));
    }
}
