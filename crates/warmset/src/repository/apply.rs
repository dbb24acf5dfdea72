//! Several changes that a configuration file asks for: all of them, or none if one cannot be.

use super::{Added, Entering, ModelOptions, Repository, Taken, Wanted, as_configured, parse_name, take};
use anyhow::{Result, anyhow, bail};
use std::collections::{BTreeMap, BTreeSet};
use warmset_catalog::{Model, ModelSettings};
use warmset_core::ModelName;
use warmset_source::{Gathered, Trust};

/// A model as the file wants it.
pub(crate) struct Wish {
    pub(crate) options: ModelOptions,
    /// Aliases that an earlier version of the file gave it and this one does not.
    pub(crate) dropped_aliases: Vec<String>,
}

/// What was changed.
pub(crate) struct Applied {
    pub(crate) added: Vec<Added>,
    pub(crate) removed: Vec<Model>,
}

/// What a wish comes to.
enum Step {
    /// Its files are the same.
    Settings(Box<Model>, ModelSettings),
    /// Its files are on this machine now.
    Take(Wanted, Gathered),
    /// Its files are in the store.
    Enter(Taken),
}

impl Repository {
    /// Whether the catalog has a model just as these options want it, and its source is what was taken.
    pub(crate) async fn is_as_configured(&self, options: &ModelOptions) -> bool {
        let Ok(name) = parse_name(&options.name) else { return false };
        let Ok(model) = self.catalog.model(&name).await else { return false };
        take::unchanged(&self.runtimes, options, &model).is_some() && self.holds(&model.manifest)
    }

    /// Carries out every wish and removal, or nothing and an error that names everything that is wrong.
    pub(crate) async fn apply(&self, wishes: Vec<Wish>, removed: &[ModelName]) -> Result<Applied> {
        let mut wrong = Vec::new();
        let mut steps = Vec::new();
        // What takes long comes first and changes nothing.
        for wish in wishes {
            match self.prepare(&wish.options).await {
                Ok(step) => steps.push((wish, step)),
                Err(error) => wrong.push(format!("the configured model {}: {error:#}", wish.options.name)),
            }
        }
        let _one_at_a_time = self.changes.lock().await;
        let mut ready = Vec::new();
        for (wish, step) in steps {
            match self.take_step(&wish.options, step).await {
                Ok(step) => ready.push((wish, step)),
                Err(error) => wrong.push(format!("the configured model {}: {error:#}", wish.options.name)),
            }
        }
        wrong.extend(self.conflicts(&ready, removed).await?);
        let outcome =
            if wrong.is_empty() { self.carry_out(ready, removed).await } else { Err(anyhow!(wrong.join("; "))) };
        self.remove_unreferenced().await;
        outcome
    }

    async fn prepare(&self, options: &ModelOptions) -> Result<Step> {
        let name = parse_name(&options.name)?;
        if let Ok(model) = self.catalog.model(&name).await
            && let Some(settings) = take::unchanged(&self.runtimes, options, &model)
            && self.holds(&model.manifest)
        {
            let settings = as_configured(options, settings, &model);
            return Ok(Step::Settings(Box::new(model), settings));
        }
        let wanted = Wanted::of(options, &self.runtimes)?;
        let gathered = self.gather(&options.name, &wanted, Trust::Operator, &mut (Box::new(|_, _| {}) as _)).await?;
        Ok(Step::Take(wanted, gathered))
    }

    async fn take_step(&self, options: &ModelOptions, step: Step) -> Result<Step> {
        let Step::Take(wanted, gathered) = step else { return Ok(step) };
        let store = self.store.clone();
        let taking = move || take::take(&store, wanted, gathered, Box::new(|_, _| {}));
        let taken = tokio::task::spawn_blocking(taking).await??;
        match options.digest {
            Some(expected) if expected != taken.digest => {
                bail!("{} has digest {}, not {expected}: check the source", options.source, taken.digest)
            }
            _ => Ok(Step::Enter(taken)),
        }
    }

    /// Names and digests that something else has which stays.
    async fn conflicts(&self, ready: &[(Wish, Step)], removed: &[ModelName]) -> Result<Vec<String>> {
        let dropped: BTreeSet<&String> = ready.iter().flat_map(|(wish, _)| &wish.dropped_aliases).collect();
        let mut owners = BTreeMap::new();
        for model in self.catalog.models().await? {
            if removed.contains(&model.name) {
                continue;
            }
            let aliases = model.aliases.iter().map(ToString::to_string).filter(|alias| !dropped.contains(alias));
            owners.extend(aliases.chain([model.name.to_string()]).map(|name| (name, model.name.clone())));
        }
        let mut wrong = Vec::new();
        for (Wish { options, .. }, step) in ready {
            for name in std::iter::once(&options.name).chain(&options.aliases) {
                if let Some(owner) = owners.get(name).filter(|owner| owner.as_str() != options.name) {
                    wrong.push(format!("the configured model {}: the name {name} is {owner}'s", options.name));
                }
            }
            if let Step::Enter(taken) = step
                && let Some(version) = self.catalog.version(&taken.digest).await?
                && version.model.as_str() != options.name
                && !removed.contains(&version.model)
            {
                let owner = version.model;
                wrong.push(format!("the configured model {}: the same model is there as {owner}", options.name));
            }
        }
        Ok(wrong)
    }

    async fn carry_out(&self, ready: Vec<(Wish, Step)>, removed: &[ModelName]) -> Result<Applied> {
        let mut applied = Applied { added: Vec::new(), removed: Vec::new() };
        for name in removed {
            // Somebody may have removed it by hand.
            if let Ok(model) = self.catalog.remove_model(name).await {
                self.shapes.forget(&model.digest);
                applied.removed.push(model);
            }
        }
        for (wish, _) in &ready {
            for alias in &wish.dropped_aliases {
                let _ = self.catalog.remove_alias(&parse_name(alias)?).await;
            }
        }
        for (Wish { options, .. }, step) in ready {
            let name = parse_name(&options.name)?;
            let added = match step {
                Step::Settings(model, settings) => {
                    self.change_settings(&model, &settings).await?;
                    self.ensure_aliases(&name, &options.aliases).await?;
                    Added::same(self.catalog.model(&name).await?)
                }
                Step::Enter(taken) => self.enter(&name, &options, &taken, &Entering::Reloaded).await?,
                Step::Take(..) => bail!("{name} was not taken"),
            };
            applied.added.push(added);
        }
        Ok(applied)
    }
}
